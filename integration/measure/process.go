// Package measure looks at processes from outside, as Linux shows them: threads,
// memory, sockets and processor time; and takes CPU profiles apart by what the
// time was spent on.
package measure

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// Process is a process at a moment.
type Process struct {
	Threads int
	RSS     int64         // bytes that are resident
	CPU     time.Duration // used so far, by the user and the kernel for it
	FDs     int           // open file descriptors
	Sockets int           // of those
}

// ticks is how many clock ticks a second has in /proc, on every architecture that
// Go runs on.
const ticks = 100

// Of returns what a process is like now.
func Of(pid int) (Process, error) {
	var p Process
	dir := fmt.Sprintf("/proc/%d", pid)
	stat, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return p, fmt.Errorf("measure: %w", err)
	}
	// The name in parentheses may hold anything.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 22 {
		return p, fmt.Errorf("measure: %s/stat has %d fields", dir, len(fields))
	}
	var numbers [4]int64
	for i, at := range []int{11, 12, 17, 21} { // utime, stime, num_threads, rss
		if numbers[i], err = strconv.ParseInt(fields[at], 10, 64); err != nil {
			return p, fmt.Errorf("measure: %s/stat: %w", dir, err)
		}
	}
	p.CPU = time.Duration(numbers[0]+numbers[1]) * time.Second / ticks
	p.Threads, p.RSS = int(numbers[2]), numbers[3]*int64(os.Getpagesize())
	entries, err := os.ReadDir(dir + "/fd")
	if err != nil {
		return p, fmt.Errorf("measure: %w", err)
	}
	p.FDs = len(entries)
	for _, e := range entries {
		target, err := os.Readlink(dir + "/fd/" + e.Name())
		if err == nil && strings.HasPrefix(target, "socket:") {
			p.Sockets++
		}
	}
	return p, nil
}

// Dialled counts the TCP connections of this network namespace that somebody has
// dialled to one of the ports and that are established.
func Dialled(ports map[int]bool) (int, error) {
	n := 0
	for _, name := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		data, err := os.ReadFile(name)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("measure: %w", err)
		}
		lines := bufio.NewScanner(bytes.NewReader(data))
		for lines.Scan() {
			f := strings.Fields(lines.Text())
			const established = "01"
			if len(f) < 4 || f[3] != established {
				continue
			}
			_, hex, _ := strings.Cut(f[2], ":")
			if port, err := strconv.ParseUint(hex, 16, 16); err == nil && ports[int(port)] {
				n++
			}
		}
	}
	return n, nil
}
