package manifests
import (
 _ "helm.sh/helm/v4/pkg/engine"
 _ "helm.sh/helm/v4/pkg/chart/v2/loader"
 _ "helm.sh/helm/v4/pkg/chart/common/util"
 _ "sigs.k8s.io/kustomize/api/krusty"
 _ "sigs.k8s.io/kustomize/kyaml/filesys"
 _ "k8s.io/api/apps/v1"
 _ "k8s.io/api/policy/v1"
 _ "k8s.io/api/rbac/v1"
 _ "k8s.io/api/networking/v1"
 _ "sigs.k8s.io/yaml"
)
