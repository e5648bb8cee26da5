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
# copies extended attributes from stage to stage. frontend raises those that its
# container allows: with --speaker=external it needs none. BIRD has none in its file and inherits
# those of frontend as ambient ones: frontend sets TCP_NODELAY on its sockets.
# nftables and policy rules are set by netlink: neither nft nor ip is needed. busybox has the
# tools of those who look into the pod.
RUN apt-get update \
	&& apt-get install -y --no-install-recommends bird2 busybox-static libcap2-bin \
	&& setcap cap_net_admin,cap_net_bind_service,cap_net_raw+p /usr/local/bin/frontend \
	&& apt-get purge -y --auto-remove libcap2-bin \
	&& rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log
USER 10002:10002
EXPOSE 7780/tcp 2224/tcp
ENTRYPOINT ["/usr/local/bin/frontend"]
CMD ["run"]
