# The image of target. Build it in the repository's root:
#   docker build -f deployments/images/target.Dockerfile --build-arg VERSION=v0.1.0 -t vipgate/target .
FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY cmd/ cmd/
COPY pkg/ pkg/
ARG VERSION=unreleased
RUN CGO_ENABLED=0 go build -trimpath \
	-ldflags "-s -w -X github.com/vipgate/vipgate/cmd/internal/cli.buildVersion=${VERSION}" \
	-o /out/target ./cmd/target

FROM debian:bookworm-slim
COPY --from=build /out/target /usr/local/bin/target
# NET_ADMIN is for routes, rules, neighbors and nftables, which are set by netlink: neither
# nft nor ip is needed. It is given here and not in the build stage: not every builder copies
# extended attributes from stage to stage. From then on target does not start without it, not
# even for root.
RUN apt-get update \
	&& apt-get install -y --no-install-recommends libcap2-bin \
	&& setcap cap_net_admin+ep /usr/local/bin/target \
	&& apt-get purge -y --auto-remove libcap2-bin \
	&& rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log
USER 10003:10003
EXPOSE 7783/tcp 2226/tcp
ENTRYPOINT ["/usr/local/bin/target"]
CMD ["run"]
