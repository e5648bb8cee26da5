# The image that replaces the frontend of Meridio 1.x: docs/meridio.md. Build it in the repository's root:
#   docker build -f deployments/images/meridio-frontend.Dockerfile --build-arg VERSION=v0.1.0 -t vipgate/meridio-frontend .
FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY cmd/ cmd/
COPY pkg/ pkg/
ARG VERSION=unreleased
RUN CGO_ENABLED=0 go build -trimpath \
	-ldflags "-s -w -X github.com/vipgate/vipgate/cmd/internal/cli.buildVersion=${VERSION}" \
	-o /out/ ./cmd/meridio-frontend ./cmd/grpc_health_probe

FROM debian:bookworm-slim
COPY --from=build /out/meridio-frontend /usr/local/bin/frontend
COPY --from=build /out/grpc_health_probe /bin/grpc_health_probe
# The capabilities are those of frontend.Dockerfile, for the reasons there. Meridio's pod allows more
# (DAC_OVERRIDE, SYS_PTRACE, for tools of its image), which nothing here has.
# Operators and their scripts run these tools in the container; busybox has those that Debian's slim image lacks.
RUN apt-get update \
	&& apt-get install -y --no-install-recommends bird2 busybox-static libcap2-bin \
	&& setcap cap_net_admin,cap_net_bind_service,cap_net_raw+ep /usr/local/bin/frontend \
	&& apt-get purge -y --auto-remove libcap2-bin \
	&& ln -sf /bin/busybox /usr/local/bin/cat \
	&& ln -sf /bin/busybox /usr/local/bin/ip \
	&& ln -sf /bin/busybox /usr/local/bin/ls \
	&& ln -sf /bin/busybox /usr/local/bin/netstat \
	&& ln -sf /bin/busybox /usr/local/bin/ps \
	&& ln -sf /bin/busybox /usr/local/bin/tail \
	&& rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log
# Meridio's image starts ./frontend here, and so do those who run ./frontend --debug.
WORKDIR /home/meridio
RUN ln -sf /usr/local/bin/frontend /home/meridio/frontend
USER 10001:10001
EXPOSE 7780/tcp 2224/tcp
ENTRYPOINT ["./frontend"]
CMD ["run"]
