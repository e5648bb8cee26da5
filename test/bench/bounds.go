package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

// Further measurements of rows 4, 7 and 10.
const (
	externalKill    = "frontend kill -9, FRR as the speaker → last withdraw"
	earlyStarts     = "starts that advertise before the target accepts connections"
	unnumberedStart = "start → VIPs at an unnumbered gateway"
	unreadLog       = "SIGTERM to lb without a drain, its log not read → its exit"

	externalVIPs   = 1000
	unnumberedVIPs = 2 // one of each family
)

// measureExternalLoss is the part of row 4 with an FRR that another program runs: the frontend is
// killed.
func measureExternalLoss(ctx context.Context, s *session) error {
	if lacks := lab.MissingForFRR(); lacks != "" {
		s.note(4, "not measured with FRR as the speaker: the machine lacks %s", lacks)
		return nil
	}
	n := s.sizes([]int{externalVIPs}, []int{100})[0]
	m := Measurement{Row: 4, What: externalKill, Method: vipgate, N: n, Unit: "ms", Goal: "median ≤ 50"}
	err := on(ctx, s, n, bothFamilies, func(fx *fixture) error {
		start, err := fx.startExternalSpeaker()
		if err != nil {
			return err
		}
		fx.expectExit()
		for range s.repeats(50, 1) {
			p, err := start()
			if err != nil {
				return err
			}
			if _, err := fx.waitCount(n); err != nil {
				return err
			}
			if err := fx.pause(200*time.Millisecond + phase(s.lasts(time.Second, time.Millisecond))); err != nil {
				return err
			}
			took, err := fx.lose(loss{signal: unix.SIGKILL}, p)
			if err != nil {
				return err
			}
			m.Samples = append(m.Samples, took)
			if err := p.Kill(); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		s.record(m)
	}
	return err
}

// startExternalSpeaker starts an FRR in the pod with the configuration that speaker-config prints,
// and returns a function that starts a frontend, whose readiness is a file.
func (fx *fixture) startExternalSpeaker() (start func() (*lab.Process, error), err error) {
	var trench strings.Builder
	session := fmt.Sprintf("- {localASN: %d, remoteASN: %d, remotePort: %d, ", lab.PodAS, uint32(lab.GatewayAS),
		lab.BGPPort)
	trench.WriteString(strings.ReplaceAll(fx.attractor(), "- {name: gateway-", session+"name: gateway-"))
	trench.WriteString("streams:\n  - name: stream-a\n    vips:\n")
	for _, v := range fx.vips {
		fmt.Fprintf(&trench, "      - %q\n", v)
	}
	readiness := fx.path("readiness")
	// FRR's user needs search permission.
	err = errors.Join(os.Chmod(fx.Dir, 0o755), os.Mkdir(readiness, 0o755), fx.pod.WriteTrench(trench.String()),
		os.WriteFile(readiness+"/lb-ready-stream-a", nil, 0o644),
		fx.Pod.Addr("lo", "10.77.0.1/29", "fd00:77::1/126"))
	if err != nil {
		return nil, err
	}
	flags := []string{
		"--trench-file=" + fx.pod.TrenchFile(), "--speaker-address=10.77.0.1", "--speaker-local=10.77.0.2",
		"--speaker-next-hop=fd00:77::2", fmt.Sprintf("--speaker-as=%d", lab.PodAS),
		"--speaker-password-file=none",
	}
	text, err := fx.pod.Run(fx.ctx, "frontend", append([]string{"speaker-config", "frr"}, flags...)...)
	if err != nil {
		return nil, err
	}
	frr, err := lab.StartFRR(fx.Pod, fx.Dir, lab.GatewayConfig{
		Name: "speaker", BFD: strings.Contains(text, " bfd"), Text: "! bgpd_options=\"-p 179\"\n" + text,
	})
	if frr != nil {
		fx.ends = append(fx.ends, func() error {
			var errs []error
			for _, p := range frr.Processes() {
				errs = append(errs, p.Kill())
			}
			return errors.Join(errs...)
		})
	}
	if err != nil {
		return nil, err
	}
	if _, err := fx.waitEstablished(); err != nil {
		return nil, err
	}
	return func() (*lab.Process, error) {
		fx.pod.Frontend, err = fx.Start(fx.Pod, "frontend", append([]string{
			fx.pod.Binaries + "/frontend", "run", "--speaker=external", "--speaker-socket=" + fx.path("speaker/bgpd.vty"),
			"--bird-dir=" + fx.path("state"), "--admin-socket=unix://" + fx.pod.FrontendAdmin(), "--readiness-dir=" + readiness,
			"--log-format=text", "--flap-backoff=off",
		}, flags...)...)
		return fx.pod.Frontend, err
	}, nil
}

// earlyLabs is the number of labs in which pods start concurrently: most of the time they wait.
const earlyLabs = 5

// measureEarlyStarts is the part of row 7 that counts starts whose VIP is at the gateway although
// the target has never accepted a connection. The target starts up to 3 s after the pod.
func measureEarlyStarts(ctx context.Context, s *session) error {
	starts := s.repeats(200/earlyLabs, 1)
	var mu sync.Mutex
	early := 0
	g, ctx := errgroup.WithContext(ctx)
	for range earlyLabs {
		g.Go(func() error {
			for range starts {
				err := on(ctx, s, 1, oneFamily, func(fx *fixture) error {
					if err := errors.Join(fx.pod.StartLB(), fx.startFrontend()); err != nil {
						return err
					}
					if err := fx.pause(phase(3 * time.Second)); err != nil {
						return err
					}
					up := time.Now()
					if err := fx.startTarget(); err != nil {
						return err
					}
					first, err := fx.waitState(0, fx.vips[0], true)
					if first.Before(up) {
						mu.Lock()
						early++
						mu.Unlock()
					}
					return err
				})
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	s.record(Measurement{
		Row: 7, What: earlyStarts, Method: vipgate, N: 1, Unit: "starts", Goal: "max ≤ 0",
		Samples: []float64{float64(early)},
	})
	s.note(7, "%d starts with a target that comes later", starts*earlyLabs)
	return nil
}

// measureUnnumberedStart is the part of row 7 with a gateway without addresses, a BIRD or an FRR,
// which runs before the pod starts.
func measureUnnumberedStart(ctx context.Context, s *session) error {
	for _, kind := range []lab.Kind{lab.KindBIRD, lab.KindFRR} {
		if kind == lab.KindFRR && lab.MissingForFRR() != "" {
			s.note(7, "no unnumbered FRR was measured: the machine lacks %s", lab.MissingForFRR())
			continue
		}
		m := Measurement{
			Row: 7, What: unnumberedStart + ", " + string(kind), Method: vipgate, N: unnumberedVIPs, Unit: "s", Goal: "max ≤ 6",
		}
		for range s.repeats(10, 1) {
			err := on(ctx, s, unnumberedVIPs, bothFamilies, func(fx *fixture) error {
				took, err := fx.startUnnumbered(kind)
				m.Samples = append(m.Samples, took)
				return err
			})
			if err != nil {
				return err
			}
		}
		s.record(m)
	}
	return nil
}

// startUnnumbered starts a gateway with the configuration that gateway-config prints and a pod, and
// returns the seconds until the gateway has the VIP.
func (fx *fixture) startUnnumbered(kind lab.Kind) (float64, error) {
	interfaces := fmt.Sprintf("  interface: %s\n  gateways:\n    - {name: gateway-a, interface: %[1]s, remoteASN: %d}\n"+
		"  vips:\n", lab.External, uint32(lab.GatewayAS))
	_, rest, _ := strings.Cut(fx.trench(), "  vips:\n")
	text := "trench: trench-a\nattractor:\n  name: attractor-a-1\n" + interfaces + rest
	err := errors.Join(fx.receiver.Close(), fx.Pod.IP("addr", "flush", "dev", lab.External, "scope", "global"),
		fx.Gateway.IP("addr", "flush", "dev", "trench0", "scope", "global"), fx.pod.WriteTrench(text), fx.startTarget())
	if err != nil {
		return 0, err
	}
	printed, err := fx.pod.Run(fx.ctx, "frontend", "gateway-config", strings.ToLower(string(kind)),
		"--trench-file="+fx.pod.TrenchFile(), "--external-interface="+lab.External)
	if err != nil {
		return 0, err
	}
	c := lab.GatewayA()
	c.Name, c.Text, c.BFD = "router-a", strings.ReplaceAll(printed, "INTERFACE", "trench0"), false
	router, err := fx.StartRouter(kind, fx.Gateway, c)
	if err != nil {
		return 0, err
	}
	began := time.Now()
	if err := errors.Join(fx.pod.StartLB(), fx.pod.StartFrontend()); err != nil {
		return 0, err
	}
	ctx, cancel := fx.withTimeout()
	defer cancel()
	if err = router.WantRoutes(ctx, fx.vips[0].String(), fx.vips[1].String()); err != nil {
		for _, p := range router.Processes() {
			err = fmt.Errorf("%w\n== last lines of %s of the gateway\n%s", err, p.Name, p.Tail(10))
		}
	}
	return time.Since(began).Seconds(), fx.explain(ctx, err)
}

// measureUnreadLog is the part of row 10 with a log pipe that is full: the log writer gives up, and
// the process ends.
func measureUnreadLog(ctx context.Context, s *session) error {
	m := Measurement{Row: 10, What: unreadLog, Method: vipgate, N: 1, Unit: "s", Goal: "max ≤ 1"}
	err := on(ctx, s, 1, []vip.Family{vip.IPv4}, func(fx *fixture) error {
		path := fx.path("unread")
		if err := errors.Join(unix.Mkfifo(path, 0o600), fx.startTarget()); err != nil {
			return err
		}
		pipe, err := os.OpenFile(path, os.O_RDWR, 0) // waits for neither reader nor writer
		if err != nil {
			return err
		}
		defer pipe.Close()
		if err := fillPipe(path); err != nil {
			return err
		}
		for range s.repeats(10, 1) {
			shell := []string{"/bin/sh", "-c", `exec "$@" 2>` + path, "sh"}
			fx.pod.LB, err = fx.Start(fx.Pod, "lb", append(shell, fx.pod.LBArgs("--drain-time=0s")...)...)
			if err != nil {
				return err
			}
			if err := fx.startFrontend(); err != nil {
				return err
			}
			fx.expectExit()
			if err := fx.waitAll(); err != nil {
				return err
			}
			took, err := fx.endAll(fx.pod.LB)
			if err != nil {
				return err
			}
			m.Samples = append(m.Samples, took)
			if err := fx.pod.Frontend.Kill(); err != nil {
				return err
			}
			if _, err := fx.waitCount(0); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		s.record(m)
	}
	return err
}

// fillPipe writes to a FIFO until a write would block.
func fillPipe(path string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("pipe %s: %w", path, err)
	}
	for err == nil {
		_, err = unix.Write(fd, []byte("\n"))
	}
	if errors.Is(err, unix.EAGAIN) {
		err = nil
	}
	return errors.Join(err, unix.Close(fd))
}
