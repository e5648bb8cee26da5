module github.com/vipgate/vipgate

go 1.26.0

require (
	github.com/alecthomas/kong v1.17.0 // flags and commands from struct tags; variables, groups and help in one place
	github.com/cilium/ebpf v0.22.0 // loads and attaches the tcx program of pkg/fastpath
	github.com/fsnotify/fsnotify v1.10.1 // inotify for the trench file and the readiness files
	github.com/google/go-cmp v0.7.0 // tests: differences of structures
	github.com/google/nftables v0.3.0 // encodes nftables expressions
	github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus v1.1.1 // the metrics grpc_server_*
	github.com/mdlayher/netlink v1.7.3-0.20250113171957-fbb4dce95f42 // netlink sockets below google/nftables, and their errors
	github.com/osrg/gobgp/v4 v4.8.0 // BGP messages of the announcer
	github.com/pion/sctp v1.12.1 // tests: SCTP without the kernel's
	github.com/prometheus/client_golang v1.25.0 // metrics and their HTTP handler
	github.com/prometheus/client_model v0.6.3 // tests: reads metric families
	github.com/rogpeppe/go-internal v1.16.0 // tests: command lines as txtar scripts
	github.com/santhosh-tekuri/jsonschema/v6 v6.0.3 // tests: validates the schema of the trench file
	github.com/spiffe/go-spiffe/v2 v2.9.0 // SPIFFE IDs, SVIDs, the Workload API
	go.opentelemetry.io/otel/exporters/otlp/otlptrace v1.47.0 // the type of the OTLP client below
	go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc v1.47.0 // OTLP over gRPC with its standard variables
	go.opentelemetry.io/otel/sdk v1.47.0 // parses OTEL_RESOURCE_ATTRIBUTES
	go.opentelemetry.io/proto/otlp v1.11.1 // messages of traces
	go.uber.org/goleak v1.3.0 // tests: each goroutine has ended
	go.yaml.in/yaml/v4 v4.0.0 // the trench file, with the line of each node
	golang.org/x/net v0.60.0 // BPF filters, DNS messages; tests: HTTP/2, ICMP
	golang.org/x/sync v0.24.0 // errgroup
	golang.org/x/sys v0.49.0 // system calls and constants of Linux
	google.golang.org/grpc v1.85.0 // the readiness stream, admin, health and registry services
	google.golang.org/protobuf v1.36.12 // generated messages
	k8s.io/api v0.37.2 // kube and vipgate only: types of Services, Pods, Events
	k8s.io/apimachinery v0.37.2 // kube and vipgate only
	k8s.io/client-go v0.37.2 // kube: reflectors, leader election, work queue; vipgate: kubeconfigs, exec
	k8s.io/cri-streaming v0.37.2 // tests: exec as a kubelet serves it
	k8s.io/klog/v2 v2.140.0 // kube and vipgate: the log of client-go
	k8s.io/streaming v0.37.2 // vipgate only: errors of client-go's exec
	pgregory.net/rapid v1.3.0 // tests: models with random sequences
)

require (
	github.com/Microsoft/go-winio v0.6.2 // indirect
	github.com/beorn7/perks v1.0.1 // indirect
	github.com/cenkalti/backoff/v5 v5.0.3 // indirect
	github.com/cespare/xxhash/v2 v2.3.0 // indirect
	github.com/davecgh/go-spew v1.1.2-0.20180830191138-d8f796af33cc // indirect
	github.com/emicklei/go-restful/v3 v3.13.0 // indirect
	github.com/fxamacker/cbor/v2 v2.9.1 // indirect
	github.com/go-jose/go-jose/v4 v4.1.5 // indirect
	github.com/go-logr/logr v1.4.4 // indirect
	github.com/go-logr/stdr v1.2.2 // indirect
	github.com/go-openapi/jsonpointer v1.0.1 // indirect
	github.com/go-openapi/jsonreference v1.0.1 // indirect
	github.com/go-openapi/swag v0.29.2 // indirect
	github.com/go-openapi/swag/cmdutils v0.29.2 // indirect
	github.com/go-openapi/swag/conv v0.29.2 // indirect
	github.com/go-openapi/swag/fileutils v0.29.2 // indirect
	github.com/go-openapi/swag/jsonutils v0.29.2 // indirect
	github.com/go-openapi/swag/loading v0.29.2 // indirect
	github.com/go-openapi/swag/mangling v0.29.2 // indirect
	github.com/go-openapi/swag/netutils v0.29.2 // indirect
	github.com/go-openapi/swag/pools v0.29.2 // indirect
	github.com/go-openapi/swag/stringutils v0.29.2 // indirect
	github.com/go-openapi/swag/typeutils v0.29.2 // indirect
	github.com/go-openapi/swag/yamlutils v0.29.2 // indirect
	github.com/google/gnostic-models v0.7.1 // indirect
	github.com/google/uuid v1.6.0 // indirect
	github.com/gorilla/websocket v1.5.4-0.20250319132907-e064f32e3674 // indirect
	github.com/grpc-ecosystem/go-grpc-middleware/v2 v2.3.3 // indirect
	github.com/grpc-ecosystem/grpc-gateway/v2 v2.31.0 // indirect
	github.com/json-iterator/go v1.1.12 // indirect
	github.com/mdlayher/socket v0.5.1 // indirect
	github.com/moby/spdystream v0.5.1 // indirect
	github.com/modern-go/concurrent v0.0.0-20180306012644-bacd9c7ef1dd // indirect
	github.com/modern-go/reflect2 v1.0.3-0.20250322232337-35a7c28c31ee // indirect
	github.com/munnerz/goautoneg v0.0.0-20191010083416-a7dc8b61c822 // indirect
	github.com/pion/logging v0.2.4 // indirect
	github.com/pion/randutil v0.1.0 // indirect
	github.com/pion/transport/v5 v5.1.4 // indirect
	github.com/pmezard/go-difflib v1.0.1-0.20181226105442-5d4384ee4fb2 // indirect
	github.com/prometheus/common v0.72.0 // indirect
	github.com/prometheus/procfs v0.22.0 // indirect
	github.com/spf13/pflag v1.0.10 // indirect
	github.com/x448/float16 v0.8.4 // indirect
	go.opentelemetry.io/auto/sdk v1.2.1 // indirect
	go.opentelemetry.io/otel v1.47.0 // indirect
	go.opentelemetry.io/otel/log v1.47.0 // indirect
	go.opentelemetry.io/otel/metric v1.47.0 // indirect
	go.opentelemetry.io/otel/trace v1.47.0 // indirect
	go.yaml.in/yaml/v2 v2.4.4 // indirect
	go.yaml.in/yaml/v3 v3.0.5 // indirect
	golang.org/x/oauth2 v0.37.0 // indirect
	golang.org/x/term v0.47.0 // indirect
	golang.org/x/text v0.43.0 // indirect
	golang.org/x/time v0.15.0 // indirect
	golang.org/x/tools v0.51.0 // indirect
	google.golang.org/genproto/googleapis/api v0.0.0-20260928230214-8a89bd6388cc // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20260928230214-8a89bd6388cc // indirect
	gopkg.in/evanphx/json-patch.v4 v4.13.0 // indirect
	gopkg.in/inf.v0 v0.9.1 // indirect
	k8s.io/kube-openapi v0.0.0-20260721132016-d427ff9ee9ad // indirect
	k8s.io/utils v0.0.0-20260626114624-be93311217bd // indirect
	sigs.k8s.io/json v0.0.0-20250730193827-2d320260d730 // indirect
	sigs.k8s.io/randfill v1.0.0 // indirect
	sigs.k8s.io/structured-merge-diff/v6 v6.4.2 // indirect
	sigs.k8s.io/yaml v1.6.0 // indirect
)
