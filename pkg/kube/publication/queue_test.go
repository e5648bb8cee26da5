package publication

// While the API server is away few objects are tried, with back-off; then all are written.
func TestAbsentAPIServerIsAskedSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI()
		a.answer = func(int, write) error { return errNetwork }
		l := a.leader()
		var failed []error
		l.failed = func(err error) { failed = append(failed, err) }
		in := input(trench(), service(), accepted(vip4))
		again := l.pass(t.Context(), in, func() bool { return false })
		if len(a.writes) > 2 || again.IsZero() || len(failed) != 1 || failed[0] == nil {
			t.Fatalf("%d writes, again at %v, failed %v", len(a.writes), again, failed)
		}
		for range 50 {
			l.pass(t.Context(), in, func() bool { return false })
			time.Sleep(100 * time.Millisecond)
		}
		if n := len(a.writes); n < 3 || n > 12 {
			t.Errorf("%d writes in 5 s", n)
		}
		a.answer = nil
		before := len(a.writes)
		time.Sleep(20 * time.Second)
		l.pass(t.Context(), in, func() bool { return false })
		var written []string
		for _, w := range a.writes[before:] {
			if w.verb == "patch" {
				written = append(written, w.resource)
			}
		}
		slices.Sort(written)
		if !slices.Equal(written, []string{"services", "trenches"}) || failed[len(failed)-1] != nil {
			t.Errorf("after the return: %v, failed %v", written, failed[len(failed)-1])
		}
	})
}

// A pass over many objects is not carried on with input that is outdated: a new Service gets its
// status within moments, and every object its turn.
func TestNewObjectDuringAPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPI()
		a.delay = func() { time.Sleep(200 * time.Millisecond) }
		many := input(trench(), service())
		many.Objects.Services, many.Result.Services = nil, nil
		add := func(in Input, name string) Input {
			s, v := service(), accepted(vip4)
			s.Name, s.UID, v.Object.Name = name, types.UID(name), name
			in.Objects.Services = append(slices.Clone(in.Objects.Services), s)
			in.Result.Services = append(slices.Clone(in.Result.Services), v)
			return in
		}
		for i := range 300 {
			many = add(many, fmt.Sprintf("web-%d", i))
		}
		changed := many
		changed.Objects.Services, changed.Result.Services = nil, nil
		for i, s := range many.Objects.Services {
			s, v := s.DeepCopy(), many.Result.Services[i]
			s.ResourceVersion, v.VIPs = "10000", []vip.VIP{vip6}
			changed.Objects.Services = append(changed.Objects.Services, s)
			changed.Result.Services = append(changed.Result.Services, v)
		}
		in := latest.New(many)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			a.leader().run(ctx, in)
		}()
		time.Sleep(10 * time.Second) // all have a status
		in.Set(changed)
		time.Sleep(time.Second)
		in.Set(add(changed, "z-new"))
		since := time.Now()
		time.Sleep(12 * time.Second)
		synctest.Wait()
		cancel()
		<-ended
		times := map[string]int{}
		for _, w := range a.of("services") {
			if times[w.name]++; w.name == "z-new" && w.at.Sub(since) > time.Second {
				t.Errorf("the new Service waited for %s", w.at.Sub(since))
			}
		}
		for name, n := range times {
			if want := map[bool]int{true: 1, false: 2}[name == "z-new"]; n != want {
				t.Errorf("Service %s was written %d times, want %d", name, n, want)
			}
		}
		if len(times) != 301 {
			t.Errorf("%d Services have a status", len(times))
		}
	})
}

