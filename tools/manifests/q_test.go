package manifests
import ("testing";"fmt";"sigs.k8s.io/yaml")
func TestQ(t *testing.T){ for k,o:=range kustomize(t, root+"/deployments/quickstart"){ b,_:=yaml.Marshal(o); fmt.Println("###",k); if k=="Deployment vipgate-quickstart/vipgate"||k=="Trench vipgate-quickstart/trench-a" {fmt.Println(string(b))}}}
