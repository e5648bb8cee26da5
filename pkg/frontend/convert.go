package frontend

import (
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/kernel"
)

func advertisementProto(a gate.Advertisement) readinessv1.Advertisement {
	switch a {
	case gate.Announced:
		return readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED
	case gate.Depreferred:
		return readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED
	default:
		return readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN
	}
}

// reasonProto relies on the order of the proto's values, which is that of the gate's table; a test
// compares the names.
func reasonProto(r gate.Reason) readinessv1.AdvertisementReason {
	return readinessv1.AdvertisementReason(r) + 1
}

func (o Options) kernelOptions() kernel.Options {
	return kernel.Options{TableID: o.Kernel.TableID, Priority: o.Kernel.Priority, Mark: o.Kernel.Mark, Mask: o.Kernel.Mask, External: o.ExternalInterface, Log: o.Log}
}

func (o Options) birdOptions(password string) bird.Options {
	return bird.Options{
		Executable: o.BIRD.Executable, Dir: o.BIRD.Dir, Socket: o.BIRD.Socket, RouterID: o.BIRD.RouterID,
		Interface: o.ExternalInterface, LoopbackPort: o.BIRD.LoopbackPort, Password: password,
		TableID: o.Kernel.TableID, ECMP: o.Kernel.ECMP, KernelScanTime: o.BIRD.ScanTime,
		LogBIRD: o.BIRD.LogBIRD, LogFileSize: o.BIRD.LogFileSize, Log: o.Log,
	}
}
