# The image of kube. Build it in the repository's root:
#   docker build -f deployments/images/kube.Dockerfile --build-arg VERSION=v0.1.0 -t vipgate/kube .
FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY cmd/ cmd/
COPY pkg/ pkg/
ARG VERSION=unreleased
RUN CGO_ENABLED=0 go build -trimpath \
	-ldflags "-s -w -X github.com/vipgate/vipgate/cmd/internal/cli.buildVersion=${VERSION}" \
	-o /out/kube ./cmd/kube

# Nothing but the program: the kubelet mounts the authority of the API server.
FROM scratch
COPY --from=build /out/kube /usr/local/bin/kube
# The user of frontend, whose admin socket kube follows.
USER 10002:10002
EXPOSE 7782/tcp 2225/tcp
ENTRYPOINT ["/usr/local/bin/kube"]
CMD ["run"]
