# The image of lb. Build it in the repository's root:
#   docker build -f deployments/images/lb.Dockerfile --build-arg VERSION=v0.1.0 -t vipgate/lb .
FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY cmd/ cmd/
COPY pkg/ pkg/
ARG VERSION=unreleased
RUN CGO_ENABLED=0 go build -trimpath \
	-ldflags "-s -w -X github.com/vipgate/vipgate/cmd/internal/cli.buildVersion=${VERSION}" \
	-o /out/lb ./cmd/lb

FROM debian:bookworm-slim
COPY --from=build /out/lb /usr/local/bin/lb
# NET_ADMIN is for the data plane, which is set by netlink: neither nft nor ip is
# needed. NET_RAW is for the announcements of the pod's addresses. They are given here
# and not in the build stage: not every builder copies extended attributes from stage
# to stage. From then on lb does not start without them, not even for root.
RUN apt-get update \
	&& apt-get install -y --no-install-recommends libcap2-bin \
	&& setcap cap_net_admin,cap_net_raw+ep /usr/local/bin/lb \
	&& apt-get purge -y --auto-remove libcap2-bin \
	&& rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log
USER 10001:10001
EXPOSE 7781/tcp 2223/tcp
ENTRYPOINT ["/usr/local/bin/lb"]
CMD ["run"]
