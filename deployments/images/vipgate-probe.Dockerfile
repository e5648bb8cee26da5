# The image of vipgate-probe. Build it in the repository's root:
#   docker build -f deployments/images/vipgate-probe.Dockerfile --build-arg VERSION=v0.1.0 -t vipgate/vipgate-probe .
FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY cmd/ cmd/
COPY pkg/ pkg/
ARG VERSION=unreleased
RUN CGO_ENABLED=0 go build -trimpath \
	-ldflags "-s -w -X github.com/vipgate/vipgate/cmd/internal/cli.buildVersion=${VERSION}" \
	-o /out/vipgate-probe ./cmd/vipgate-probe

# Nothing but the program, which needs no capability.
FROM scratch
COPY --from=build /out/vipgate-probe /usr/local/bin/vipgate-probe
USER 10004:10004
EXPOSE 7784/tcp 2227/tcp
ENTRYPOINT ["/usr/local/bin/vipgate-probe"]
CMD ["run"]
