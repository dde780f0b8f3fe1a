// Command wget gets a URL and succeeds if the answer does. It stands in the NATS
// image that `make images` builds for the wget of the official one, so that one
// health check fits both, and knows what that needs:
//
//	wget -q -O /dev/null URL
package main

import (
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"
)

func main() {
	quiet := flag.Bool("q", false, "say nothing")
	to := flag.String("O", "-", "file to write the answer to; -: standard output")
	timeout := flag.Duration("T", 4*time.Second, "how long to wait")
	flag.Parse()
	if err := get(flag.Arg(0), *to, *timeout); err != nil {
		if !*quiet {
			fmt.Fprintln(os.Stderr, "wget:", err)
		}
		os.Exit(1)
	}
}

func get(url, to string, timeout time.Duration) error {
	client := http.Client{Timeout: timeout}
	resp, err := client.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, resp.Status)
	}
	out := os.Stdout
	if to != "-" {
		// An image from scratch has no /dev/null unless the runtime mounts it.
		if out, err = os.OpenFile(to, os.O_WRONLY|os.O_CREATE, 0o644); err != nil {
			return err
		}
		defer out.Close()
	}
	_, err = io.Copy(out, resp.Body)
	return err
}
