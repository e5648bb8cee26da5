package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
)

// metrics returns the sums of the series whose lines begin with the names, of a program in the pod.
func (fx *fixture) metrics(address string, names ...string) (sums []float64, err error) {
	ctx, cancel := fx.withTimeout()
	defer cancel()
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (conn net.Conn, err error) {
			errDo := fx.Pod.Do(func() error {
				conn, err = (&net.Dialer{}).DialContext(ctx, network, address)
				return nil
			})
			return conn, errors.Join(err, errDo)
		},
	}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	sums, err = sumsOf(response.Body, names)
	return sums, errors.Join(err, response.Body.Close())
}

// sumsOf adds, for each name, the values of all series whose line begins with it.
func sumsOf(r io.Reader, names []string) ([]float64, error) {
	sums := make([]float64, len(names))
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		line := lines.Text()
		for i, name := range names {
			if !strings.HasPrefix(line, name) {
				continue
			}
			value, err := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64)
			if err != nil {
				return nil, fmt.Errorf("metric %q: %w", line, err)
			}
			sums[i] += value
		}
	}
	return sums, lines.Err()
}
