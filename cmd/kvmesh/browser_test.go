package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// browser is a headless Chromium with one page, which is driven over a pipe with
// the DevTools protocol. What the page complains about is kept.
type browser struct {
	t       *testing.T
	in      *os.File
	session string

	mu       sync.Mutex
	next     int
	replies  map[int]chan devtoolsMessage
	closed   bool
	problems []string
}

type devtoolsMessage struct {
	ID     int             `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
	Result json.RawMessage `json:"result"`
	Error  *struct {
		Message string `json:"message"`
	} `json:"error"`
}

// findChromium returns where Chromium is.
func findChromium() (string, error) {
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome", "chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", errors.New("no Chromium is installed")
}

// startBrowser starts Chromium.
func startBrowser(t *testing.T) *browser {
	t.Helper()
	path, err := findChromium()
	if err != nil {
		if os.Getenv("KVMESH_TEST_BROWSER") != "" {
			t.Fatal(err)
		}
		t.Skip("THE DASHBOARD IS NOT TESTED: ", err, " (apt-get install chromium)")
	}
	theirIn, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	out, theirOut, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	// Not t.TempDir: what is left of the browser may still write there.
	profile, err := os.MkdirTemp("", "kvmesh-chromium-")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
		"--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe", "--user-data-dir="+profile, "about:blank")
	cmd.ExtraFiles = []*os.File{theirIn, theirOut} // 3 and 4
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirIn.Close()
	theirOut.Close()
	b := &browser{t: t, in: in, replies: map[int]chan devtoolsMessage{}}
	read := make(chan struct{})
	go func() { defer close(read); b.read(out) }()
	t.Cleanup(func() {
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // its own group: the browser and its helpers
		cmd.Wait()
		in.Close()
		<-read
		out.Close()
		for range 50 { // helpers end a little later
			if os.RemoveAll(profile) == nil {
				break
			}
			time.Sleep(20 * time.Millisecond)
		}
	})
	b.open()
	return b
}

func (b *browser) read(out *os.File) {
	r := bufio.NewReaderSize(out, 1<<20)
	for {
		data, err := r.ReadBytes(0)
		if err != nil {
			break
		}
		var m devtoolsMessage
		if json.Unmarshal(data[:len(data)-1], &m) != nil {
			continue
		}
		b.mu.Lock()
		if m.ID != 0 {
			if c := b.replies[m.ID]; c != nil {
				c <- m
				delete(b.replies, m.ID)
			}
		} else {
			b.note(m)
		}
		b.mu.Unlock()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	for _, c := range b.replies {
		close(c)
	}
	b.replies = nil
}

// note keeps what is an error of the page. b.mu is held.
func (b *browser) note(m devtoolsMessage) {
	text := string(m.Params)
	switch m.Method {
	case "Runtime.exceptionThrown":
		b.problems = append(b.problems, "exception: "+text)
	case "Runtime.consoleAPICalled":
		if strings.Contains(text, `"type":"error"`) || strings.Contains(text, `"type":"warning"`) {
			b.problems = append(b.problems, "console: "+text)
		}
	case "Log.entryAdded":
		if strings.Contains(text, `"level":"error"`) || strings.Contains(text, `"level":"warning"`) {
			b.problems = append(b.problems, "log: "+text)
		}
	}
}

// call runs a method of the protocol.
func (b *browser) call(method string, params map[string]any) json.RawMessage {
	b.t.Helper()
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		b.t.Fatalf("%s: the browser has ended", method)
	}
	b.next++
	id, c := b.next, make(chan devtoolsMessage, 1)
	b.replies[id] = c
	b.mu.Unlock()
	request := map[string]any{"id": id, "method": method, "params": params}
	if b.session != "" && !strings.HasPrefix(method, "Target.") {
		request["sessionId"] = b.session
	}
	data, err := json.Marshal(request)
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := b.in.Write(append(data, 0)); err != nil {
		b.t.Fatalf("%s: %v", method, err)
	}
	select {
	case m, ok := <-c:
		if !ok {
			b.t.Fatalf("%s: the browser has ended", method)
		}
		if m.Error != nil {
			b.t.Fatalf("%s: %s", method, m.Error.Message)
		}
		return m.Result
	case <-time.After(patience):
		b.t.Fatalf("%s: no answer in %v", method, patience)
	}
	return nil
}

func (b *browser) open() {
	b.t.Helper()
	var made struct {
		TargetID  string `json:"targetId"`
		SessionID string `json:"sessionId"`
	}
	json.Unmarshal(b.call("Target.createTarget", map[string]any{"url": "about:blank"}), &made)
	json.Unmarshal(b.call("Target.attachToTarget", map[string]any{"targetId": made.TargetID, "flatten": true}), &made)
	b.session = made.SessionID
	for _, domain := range []string{"Page", "Runtime", "Log"} {
		b.call(domain+".enable", map[string]any{})
	}
}

// screen makes the page look as on a device.
func (b *browser) screen(width, height int, phone, dark bool) {
	b.t.Helper()
	scale, scheme := 1, "light"
	if phone {
		scale = 2
	}
	if dark {
		scheme = "dark"
	}
	b.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone})
	b.call("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": scheme}}})
}

func (b *browser) navigate(url string) {
	b.t.Helper()
	b.call("Page.navigate", map[string]any{"url": url})
}

// eval runs JavaScript in the page and returns what it returns, as text.
func (b *browser) eval(script string) string {
	b.t.Helper()
	result := b.call("Runtime.evaluate", map[string]any{"expression": script, "returnByValue": true, "awaitPromise": true})
	var r struct {
		Result struct {
			Value any `json:"value"`
		} `json:"result"`
		Exception *struct {
			Text      string `json:"text"`
			Exception struct {
				Description string `json:"description"`
			} `json:"exception"`
		} `json:"exceptionDetails"`
	}
	if err := json.Unmarshal(result, &r); err != nil {
		b.t.Fatal(err)
	}
	if r.Exception != nil {
		b.t.Fatalf("%s: %s %s", script, r.Exception.Text, r.Exception.Exception.Description)
	}
	return fmt.Sprint(r.Result.Value)
}

// until waits until a script says true.
func (b *browser) until(what, script string) {
	b.t.Helper()
	for deadline := time.Now().Add(patience); b.eval("Boolean("+script+")") != "true"; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.shot("failed")
			b.t.Fatalf("not within %v: %s; the page says\n%.1500s\nproblems: %v", patience, what, b.eval("document.body.innerText"), b.complaints())
		}
	}
}

// complaints returns what the page has complained about, and forgets it.
func (b *browser) complaints() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := b.problems
	b.problems = nil
	return out
}

// shot keeps a picture of the page in dist/ui.
func (b *browser) shot(name string) {
	b.t.Helper()
	var picture struct {
		Data string `json:"data"`
	}
	if err := json.Unmarshal(b.call("Page.captureScreenshot", map[string]any{"format": "png"}), &picture); err != nil {
		b.t.Fatal(err)
	}
	data, err := base64.StdEncoding.DecodeString(picture.Data)
	if err != nil {
		b.t.Fatal(err)
	}
	dir := filepath.Join(repository, "dist", "ui")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name+".png"), data, 0o644); err != nil {
		b.t.Fatal(err)
	}
}

// background runs until the test ends.
func background(t *testing.T, run func(context.Context)) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
}
