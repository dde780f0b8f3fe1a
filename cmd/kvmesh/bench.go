package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime/pprof"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

func benchCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure: every figure is counted to completion and checked against a model",
	}
	cmd.AddCommand(
		benchDialCommand(),
		benchFleetCommand(),
		benchIndexCommand(),
		benchNATSCommand(),
		benchPipelineCommand(),
		benchColdstartCommand(), benchSelectCommand(),
		benchQueryCommand(),
		benchTraceCommand(),
	)
	return cmd
}

// profiler writes a CPU profile of the parts of a benchmark that are measured.
type profiler struct {
	path string
	file *os.File
}

func (p *profiler) add(flags *pflag.FlagSet) {
	flags.StringVar(&p.path, "cpuprofile", "", "file to write a CPU profile of the measured part to")
}

func (p *profiler) start() (err error) {
	if p.path == "" {
		return nil
	}
	if p.file, err = os.Create(p.path); err != nil {
		return err
	}
	return pprof.StartCPUProfile(p.file)
}

func (p *profiler) stop() error {
	if p.file == nil {
		return nil
	}
	pprof.StopCPUProfile()
	return p.file.Close()
}

// figures are what a benchmark found, by name.
type figures map[string]float64

// print writes the figures for people, and to a file as one flat JSON object if
// there is one.
func (f figures) print(out io.Writer, path string) error {
	for _, name := range slices.Sorted(maps.Keys(f)) {
		fmt.Fprintf(out, "%-24s %.6g\n", name, f[name])
	}
	if path == "" {
		return nil
	}
	data, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(data, '\n'), 0o644)
}

// percentile returns the p-th percentile of values, which it sorts.
func percentile[T cmp.Ordered](values []T, p float64) T {
	var zero T
	if len(values) == 0 {
		return zero
	}
	slices.Sort(values)
	return values[min(int(float64(len(values))*p/100), len(values)-1)]
}

// cpuTime returns the processor time that the process has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// residentMB returns the memory that the process has resident, in MB.
func residentMB() float64 {
	data, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	var size, resident int64
	fmt.Sscan(string(data), &size, &resident)
	return float64(resident*int64(os.Getpagesize())) / 1e6
}
