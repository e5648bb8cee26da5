# The image of lb: one static binary, no shell. Build it in the repository's root:
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

FROM gcr.io/distroless/static-debian12:nonroot
COPY --from=build /out/lb /usr/local/bin/lb
# So that `kubectl exec` finds it by its name alone.
ENV PATH=/usr/local/bin
USER 10001:10001
EXPOSE 7781/tcp 2223/tcp
ENTRYPOINT ["/usr/local/bin/lb"]
CMD ["run"]
