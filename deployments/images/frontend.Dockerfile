# The image of frontend, with BIRD. Build it in the repository's root:
#   docker build -f deployments/images/frontend.Dockerfile --build-arg VERSION=v0.1.0 -t vipgate/frontend .
FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY cmd/ cmd/
COPY pkg/ pkg/
ARG VERSION=unreleased
RUN CGO_ENABLED=0 go build -trimpath \
	-ldflags "-s -w -X github.com/vipgate/vipgate/cmd/internal/cli.buildVersion=${VERSION}" \
	-o /out/frontend ./cmd/frontend

# Debian 12 has BIRD 2.0.12, with which everything was measured.
FROM debian:bookworm-slim
COPY --from=build /out/frontend /usr/local/bin/frontend
# The capabilities are set here and not in the build stage: not every builder
# copies extended attributes from stage to stage. Both programs have the same
# ones: frontend looks into /proc at a BIRD that an earlier run left, and the
# kernel shows it only to those who have at least BIRD's capabilities.
# From then on neither starts without them, not even for root: a builder that
# ran `bird --version` here would be refused.
# nftables and policy rules are set by netlink: neither nft nor ip is needed.
RUN apt-get update \
	&& apt-get install -y --no-install-recommends bird2 libcap2-bin \
	&& setcap cap_net_admin,cap_net_bind_service,cap_net_raw+ep /usr/local/bin/frontend \
	&& setcap cap_net_admin,cap_net_bind_service,cap_net_raw+ep /usr/sbin/bird \
	&& apt-get purge -y --auto-remove libcap2-bin \
	&& rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log
USER 10002:10002
EXPOSE 7780/tcp 2224/tcp
ENTRYPOINT ["/usr/local/bin/frontend"]
CMD ["run"]
