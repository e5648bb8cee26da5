package registration

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
)

// Resolver looks up the addresses of a name. [net.Resolver] implements it.
type Resolver interface {
	// LookupNetIP returns the addresses of one family, "ip4" or "ip6". If the name has no such
	// address, the error is a [net.DNSError] with IsNotFound.
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// minLookupDelay is the first delay after a failed lookup.
const minLookupDelay = 250 * time.Millisecond

type name struct {
	Address
	resolver Resolver
	// family is the address family of the first answer, "ip4" or "ip6"; "" before the first answer.
	family string
}

type answer struct {
	from      Address
	addresses []Address // sorted
	err       error
}

// follow sends an answer for each lookup until ctx ends.
func (name *name) follow(ctx context.Context, interval time.Duration, answers chan<- answer) {
	retry := backoff.Backoff{Min: min(minLookupDelay, interval), Max: interval, Jitter: 0.2}
	for {
		ips, err := name.lookup(ctx)
		result := answer{from: name.Address, err: err}
		for _, addr := range ips {
			result.addresses = append(result.addresses, name.at(addr))
		}
		delay := interval
		if err != nil {
			delay = retry.Next()
		} else {
			retry.Reset()
		}
		select {
		case answers <- result:
		case <-ctx.Done():
			return
		}
		if backoff.Sleep(ctx, delay) != nil {
			return
		}
	}
}

// lookup returns the sorted addresses of the name, or an error if it has none.
func (name *name) lookup(ctx context.Context) ([]netip.Addr, error) {
	ctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	families := []string{"ip4", "ip6"}
	if name.family != "" {
		families = []string{name.family}
	}
	for _, family := range families {
		ips, err := name.resolver.LookupNetIP(ctx, family, name.host)
		var failure *net.DNSError
		switch {
		case err == nil && len(ips) > 0:
			name.family = family
			for i, addr := range ips {
				ips[i] = addr.Unmap()
			}
			slices.SortFunc(ips, netip.Addr.Compare)
			return slices.Compact(ips), nil
		case err == nil, errors.As(err, &failure) && failure.IsNotFound:
			// The name has no address of this family.
		default:
			// Do not try the other family after a failure: its addresses may belong to the same load
			// balancers, which would get a second registration.
			return nil, fmt.Errorf("lookup failed: %w", err)
		}
	}
	return nil, fmt.Errorf("the name has no %s", cmp.Or(map[string]string{
		"ip4": "IPv4 address", "ip6": "IPv6 address",
	}[name.family], "address"))
}

// Follow calls found with the addresses of each load balancer behind an address: once if it needs no
// lookup, else after each successful lookup, until ctx ends. failed is called with each lookup that
// fails, after which the previous addresses remain.
func Follow(ctx context.Context, address Address, resolver Resolver, found func([]Address), failed func(error)) {
	if address.fixed() {
		found([]Address{address})
		return
	}
	answers := make(chan answer)
	var following sync.WaitGroup
	defer following.Wait()
	host := &name{Address: address, resolver: resolver}
	following.Go(func() { host.follow(ctx, lookupInterval, answers) })
	for {
		select {
		case answer := <-answers:
			if answer.err != nil {
				failed(answer.err)
			} else {
				found(answer.addresses)
			}
		case <-ctx.Done():
			return
		}
	}
}
