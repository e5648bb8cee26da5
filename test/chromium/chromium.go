package chromium

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// timeout bounds each answer of the browser, and each condition of a page.
const timeout = 30 * time.Second

// Page is an open page. Its test ends with an error of the browser.
type Page struct {
	t        testing.TB
	commands *os.File
	answers  chan answer
	session  string
	last     int
}

type answer struct {
	ID     int             `json:"id"`
	Result json.RawMessage `json:"result"`
	Error  *struct {
		Message string `json:"message"`
	} `json:"error"`
}

// Open opens a page until the test ends. The test is skipped if this machine lacks Chromium.
func Open(t testing.TB, url string) *Page {
	t.Helper()
	lab.Need(t, "chromium")
	read, commands, err := os.Pipe()
	harness.Must(t, err)
	answers, write, err := os.Pipe()
	harness.Must(t, err)
	cmd := exec.Command("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
		"--hide-scrollbars", "--user-data-dir="+t.TempDir(), "--remote-debugging-pipe", "about:blank")
	cmd.ExtraFiles = []*os.File{read, write} // descriptors 3 and 4 of the protocol
	var output harness.Log
	cmd.Stderr = &output
	harness.Must(t, cmd.Start())
	_, _ = read.Close(), write.Close() // the browser has them
	page := &Page{t: t, commands: commands, answers: make(chan answer)}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer close(page.answers)
		for reader := bufio.NewReader(answers); ; {
			text, err := reader.ReadBytes(0)
			if err != nil {
				return
			}
			var a answer
			if json.Unmarshal(text[:len(text)-1], &a) == nil && a.ID != 0 { // events have none
				page.answers <- a
			}
		}
	}()
	t.Cleanup(func() {
		page.call("Browser.close", nil, nil)
		go func() {
			for range page.answers { // until the pipe is closed
			}
		}()
		kill := time.AfterFunc(timeout, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait() // also after a kill
		kill.Stop()
		<-ended
		_, _ = commands.Close(), answers.Close()
		if t.Failed() {
			t.Logf("== chromium\n%s", output.String())
		}
	})
	var target struct{ TargetID, SessionID string }
	page.call("Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	page.call("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &target)
	page.session = target.SessionID
	// A URL of createTarget is sometimes not loaded.
	page.call("Page.navigate", map[string]any{"url": url}, nil)
	return page
}

// call runs a method of the DevTools protocol.
func (p *Page) call(method string, parameters map[string]any, result any) {
	p.t.Helper()
	p.last++
	command := map[string]any{"id": p.last, "method": method, "params": parameters}
	if parameters == nil {
		command["params"] = map[string]any{}
	}
	if p.session != "" && method != "Browser.close" {
		command["sessionId"] = p.session
	}
	text, err := json.Marshal(command)
	harness.Must(p.t, err)
	_, err = p.commands.Write(append(text, 0))
	harness.Must(p.t, err)
	select {
	case a, open := <-p.answers:
		switch {
		case !open:
			p.t.Fatalf("chromium ended during %s", method)
		case a.Error != nil:
			p.t.Fatalf("%s: %s", method, a.Error.Message)
		case result != nil:
			harness.Must(p.t, json.Unmarshal(a.Result, result))
		}
	case <-time.After(timeout):
		p.t.Fatalf("chromium does not answer %s", method)
	}
}

// Evaluate returns the value of a JavaScript expression as text.
func (p *Page) Evaluate(expression string) string {
	p.t.Helper()
	var got struct {
		Result           struct{ Value any }
		ExceptionDetails *struct{ Text string }
	}
	p.call("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true}, &got)
	if got.ExceptionDetails != nil {
		return "exception: " + got.ExceptionDetails.Text
	}
	return fmt.Sprint(got.Result.Value)
}

// WaitFor waits until a JavaScript expression is true.
func (p *Page) WaitFor(expression string) {
	p.t.Helper()
	deadline := time.Now().Add(timeout)
	for p.Evaluate("Boolean("+expression+")") != "true" {
		if time.Now().After(deadline) {
			p.t.Fatalf("not true: %s\n%s", expression,
				p.Evaluate("location + ' ' + document.readyState + '\\n' + document.body.innerText"))
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// Screenshot returns a PNG of a window of this size, with a dark or a light page.
func (p *Page) Screenshot(width, height int, scheme string) []byte {
	p.t.Helper()
	p.call("Emulation.setDeviceMetricsOverride",
		map[string]any{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false}, nil)
	p.call("Emulation.setEmulatedMedia",
		map[string]any{"features": []any{map[string]any{"name": "prefers-color-scheme", "value": scheme}}}, nil)
	var got struct{ Data string }
	p.call("Page.captureScreenshot", map[string]any{"format": "png"}, &got)
	picture, err := base64.StdEncoding.DecodeString(got.Data)
	harness.Must(p.t, err)
	return picture
}
