{{- define "vipgate.labels" -}}
app.kubernetes.io/name: vipgate
app.kubernetes.io/instance: {{ quote .Release.Name }}
{{- end -}}

{{- /* The image of a container: context, name of the container. */ -}}
{{- define "vipgate.image" -}}
{{- $root := index . 0 -}}
{{- $container := index $root.Values (index . 1) -}}
{{ $root.Values.image.registry }}{{ $container.repository }}:{{ default $root.Chart.AppVersion $root.Values.image.tag }}
{{- end -}}

{{- /* The SPIFFE ID of a container: context, name of the container. */ -}}
{{- define "vipgate.spiffeID" -}}
{{- $root := index . 0 -}}
{{- $path := default (printf "/%s" $root.Values.trench.name) $root.Values.spiffe.path -}}
spiffe://{{ $root.Values.spiffe.trustDomain }}{{ $path }}/{{ index . 1 }}
{{- end -}}

{{- /* The networks of the pod, as Multus reads them. */ -}}
{{- define "vipgate.networks" -}}
{{- $networks := list .Values.networks.external -}}
{{- with .Values.networks.targets -}}
{{- $networks = append $networks . -}}
{{- end -}}
{{- toJson $networks -}}
{{- end -}}

{{- /* Names of the Secrets of the gateways' passwords, as a JSON list. */ -}}
{{- define "vipgate.secrets" -}}
{{- $names := list -}}
{{- range dig "attractor" "gateways" (list) .Values.trench.spec -}}
{{- with dig "passwordSecret" "name" "" . -}}
{{- $names = append $names . -}}
{{- end -}}
{{- end -}}
{{- $names | uniq | toJson -}}
{{- end -}}

{{- /* Rules of a Role for the objects that get the addresses of spec.publish. */ -}}
{{- define "vipgate.publishRules" -}}
{{- if dig "publish" "ingressClass" "" .Values.trench.spec }}
- apiGroups: [networking.k8s.io]
  resources: [ingresses]
  verbs: [get, list, watch]
- apiGroups: [networking.k8s.io]
  resources: [ingresses/status]
  verbs: [patch]
{{- end }}
{{- if dig "publish" "gatewayClass" "" .Values.trench.spec }}
- apiGroups: [gateway.networking.k8s.io]
  resources: [gateways]
  verbs: [get, list, watch]
- apiGroups: [gateway.networking.k8s.io]
  resources: [gateways/status]
  verbs: [patch]
{{- end }}
{{- end -}}

{{- define "vipgate.subject" -}}
subjects:
  - kind: ServiceAccount
    name: vipgate
    namespace: {{ quote .Release.Namespace }}
{{- end -}}
