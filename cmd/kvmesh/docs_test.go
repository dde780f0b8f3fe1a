package main

import (
	"bytes"
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

const repository = "../.."

// accepts fails unless the command line is one that kvmesh takes.
func accepts(t *testing.T, where string, args []string) {
	t.Helper()
	top := root()
	top.InitDefaultCompletionCmd()
	cmd, rest, err := top.Find(args)
	if err != nil {
		t.Errorf("%s: kvmesh %s: %v", where, strings.Join(args, " "), err)
		return
	}
	if cmd == top && len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		t.Errorf("%s: kvmesh %s: no such command", where, strings.Join(args, " "))
		return
	}
	cmd.InitDefaultHelpFlag()
	cmd.InitDefaultVersionFlag()
	if err := cmd.ParseFlags(rest); err != nil && err != pflag.ErrHelp {
		t.Errorf("%s: kvmesh %s: %v", where, strings.Join(args, " "), err)
		return
	}
	if cmd.Runnable() && cmd.Args != nil && !slices.Contains(args, "--help") {
		if err := cmd.Args(cmd, cmd.Flags().Args()); err != nil {
			t.Errorf("%s: kvmesh %s: %v", where, strings.Join(args, " "), err)
		}
	}
}

// words splits a line of shell as far as the documents need it: at blanks, quotes
// hold together, and what comes after the command is cut off.
func words(line string) (out []string) {
	pattern := regexp.MustCompile(`(?:[^\s'"]+|'[^']*'|"[^"]*")+`)
	for _, w := range pattern.FindAllString(line, -1) {
		if w == "|" || w == ">" || w == "&&" || w == "&" || strings.HasPrefix(w, "#") || w == "-" && len(out) == 0 {
			break
		}
		out = append(out, strings.NewReplacer(`'`, "", `"`, "").Replace(w))
	}
	return out
}

// Every kvmesh command line in the documents is one that this kvmesh takes.
func TestDocumentedCommandLines(t *testing.T) {
	block := regexp.MustCompile("(?s)```sh\n(.*?)```")
	call := regexp.MustCompile(`(?m)(?:^|&& |\./)kvmesh ((?:.*\\\n)*.*)$`)
	inline := regexp.MustCompile("`kvmesh ([a-z][^`|]*)`")
	found := 0
	for _, pattern := range []string{"README.md", "docs/*.md", "docs/*/*.md"} {
		files, err := filepath.Glob(filepath.Join(repository, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, b := range block.FindAllSubmatch(text, -1) {
				for _, line := range call.FindAllSubmatch(b[1], -1) {
					found++
					accepts(t, file, words(strings.ReplaceAll(string(line[1]), "\\\n", " ")))
				}
			}
			for _, line := range inline.FindAllSubmatch(text, -1) {
				if strings.ContainsAny(string(line[1]), "…") {
					continue
				}
				found++
				args := words(string(line[1]))
				if args[0] == "query" && len(args) == 1 || args[0] == "docs" { // named, not called
					continue
				}
				accepts(t, file, args)
			}
		}
	}
	if found < 14 {
		t.Errorf("only %d command lines found in the documents", found)
	}
}

// The example configuration is one of `kvmesh serve`, and its workers are sound.
func TestExampleConfiguration(t *testing.T) {
	cmd, _, err := root().Find([]string{"serve"})
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Flags().Set("config", filepath.Join(repository, "docs/deploy/kvmesh.yaml")); err != nil {
		t.Fatal(err)
	}
	if err := settle(cmd); err != nil {
		t.Fatal(err)
	}
	workers, err := cmd.Flags().GetStringArray("worker")
	if err != nil || len(workers) != 2 {
		t.Fatalf("workers of the example: %v, %v", workers, err)
	}
	f := workerFlags{workers: workers, model: "m", group: "default", blockSize: 16}
	if _, err := f.parse(cmd.Flags()); err != nil {
		t.Error(err)
	}
}

// The unit starts roles that there are, and systemd finds nothing wrong with it.
func TestSystemdUnit(t *testing.T) {
	path := filepath.Join(repository, "docs/deploy/systemd/kvmesh@.service")
	unit, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	start := regexp.MustCompile(`(?m)^ExecStart=/usr/bin/kvmesh (.*)$`).FindSubmatch(unit)
	if start == nil {
		t.Fatal("the unit starts no kvmesh")
	}
	for _, role := range []string{"serve", "bridge", "indexer"} {
		accepts(t, path, strings.Fields(strings.ReplaceAll(string(start[1]), "%i", role)))
	}
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd-analyze is not installed here")
	}
	here := filepath.Join(t.TempDir(), "kvmesh@serve.service")
	self, err := os.Executable() // /usr/bin/kvmesh may not be there
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(here, bytes.ReplaceAll(unit, []byte("/usr/bin/kvmesh"), []byte(self)), 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(analyze, "verify", "--man=no", here).CombinedOutput()
	if complaint := regexp.MustCompile(`(?m)^.*kvmesh@.*$`).FindAll(out, -1); len(complaint) > 0 {
		t.Errorf("systemd-analyze: %v\n%s", err, bytes.Join(complaint, []byte("\n")))
	}
}

// manifests returns the objects in the Kubernetes manifests.
func manifests(t *testing.T) (out []map[string]any) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(repository, "docs/deploy/kubernetes/*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if filepath.Base(file) == "nats-values.yaml" {
			continue
		}
		f, err := os.Open(file)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		decoder := yaml.NewDecoder(f)
		for {
			var object map[string]any
			if decoder.Decode(&object) != nil {
				break
			}
			out = append(out, object)
		}
	}
	return out
}

// Containers of the manifests run command lines that kvmesh takes, environment
// variables that are flags, unprivileged, with probes of paths that there are.
func TestKubernetesManifests(t *testing.T) {
	kinds := map[string]bool{}
	for _, object := range manifests(t) {
		kinds[object["kind"].(string)] = true
		spec, _ := at(object, "spec", "template", "spec").(map[string]any)
		if spec == nil {
			continue
		}
		name := at(object, "metadata", "name").(string)
		if at(object, "spec", "selector", "matchLabels", "app.kubernetes.io/component") != at(object, "spec", "template", "metadata", "labels", "app.kubernetes.io/component") {
			t.Errorf("%s does not select its own pods", name)
		}
		if at(spec, "securityContext", "runAsNonRoot") != true {
			t.Errorf("%s may run as root", name)
		}
		for _, c := range spec["containers"].([]any) {
			c := c.(map[string]any)
			var args []string
			for _, a := range c["args"].([]any) {
				args = append(args, a.(string))
			}
			accepts(t, name, args)
			cmd, _, _ := root().Find(args)
			for _, e := range c["env"].([]any) {
				variable := at(e, "name").(string)
				known := variable == "GOMEMLIMIT" || variable == "NODE" // which the arguments name
				cmd.Flags().VisitAll(func(f *pflag.Flag) { known = known || envName(f.Name) == variable })
				if !known {
					t.Errorf("%s: %s is no setting of %s", name, variable, cmd.Name())
				}
			}
			if at(c, "securityContext", "allowPrivilegeEscalation") != false || at(c, "securityContext", "readOnlyRootFilesystem") != true {
				t.Errorf("%s: the container is not locked down", name)
			}
			probes := 0
			for _, probe := range []string{"startupProbe", "livenessProbe", "readinessProbe"} {
				path, ok := at(c, probe, "httpGet", "path").(string)
				if !ok {
					continue
				}
				probes++
				if path != "/health" && !(path == "/ready" && cmd.Name() == "indexer") {
					t.Errorf("%s: %s asks %s", name, probe, path)
				}
			}
			if probes < 2 {
				t.Errorf("%s has %d probes", name, probes)
			}
		}
	}
	for _, kind := range []string{"DaemonSet", "Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "Namespace"} {
		if !kinds[kind] {
			t.Errorf("there is no %s", kind)
		}
	}
}

// The man page and the completions have every command and flag.
func TestManualAndCompletions(t *testing.T) {
	dir := t.TempDir()
	if _, err := command(t, "docs", dir); err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(dir, "man/kvmesh.1"))
	if err != nil {
		t.Fatal(err)
	}
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Hidden {
			return
		}
		if c.Runnable() && c.Name() != "help" && c.Name() != "completion" {
			mustContain(t, string(page), ".SS "+roff(c.UseLine()))
			c.NonInheritedFlags().VisitAll(func(f *pflag.Flag) {
				if !f.Hidden {
					mustContain(t, string(page), `\fB\-\-`+roff(f.Name)+`\fR`)
				}
			})
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(root())
	if groff, err := exec.LookPath("groff"); err == nil {
		out, err := exec.Command(groff, "-man", "-ww", "-z", "-Tutf8", filepath.Join(dir, "man/kvmesh.1")).CombinedOutput()
		if err != nil || len(bytes.TrimSpace(out)) > 0 {
			t.Errorf("groff: %v\n%s", err, out)
		}
	}
	for name, shell := range map[string]string{"kvmesh.bash": "bash", "_kvmesh": "zsh", "kvmesh.fish": "fish"} {
		path := filepath.Join(dir, "completions", name)
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
		if bin, err := exec.LookPath(shell); err == nil {
			if out, err := exec.Command(bin, "-n", path).CombinedOutput(); err != nil {
				t.Errorf("%s: %v\n%s", name, err, out)
			}
		}
	}
}

func TestCompletionOfValues(t *testing.T) {
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{"__complete", "serve", "--on-gap", ""}, []string{"keep\n", "reset\n"}},
		{[]string{"__complete", "indexer", "--log-level", "w"}, []string{"warn\n"}},
		{[]string{"__complete", "mock", "--dialect", ""}, []string{"vllm"}},
		{[]string{"__complete", "serve", "--data"}, []string{"--data-dir"}},
		{[]string{"__complete", "ch"}, []string{"check\t"}},
	} {
		out, err := command(t, c.args...)
		if err != nil {
			t.Fatal(err)
		}
		mustContain(t, out, c.want...)
	}
}

func TestVersionAndBillOfMaterials(t *testing.T) {
	out, err := command(t, "version")
	if err != nil {
		t.Fatal(err)
	}
	mustContain(t, out, "kvmesh ", "go       go1.", "records  version 1")
	bin := filepath.Join(t.TempDir(), "kvmesh")
	if out, err := exec.Command("go", "build", "-o", bin, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if out, err = command(t, "version", "--of", bin, "--json"); err != nil {
		t.Fatal(err)
	}
	var b build
	if err := json.Unmarshal([]byte(out), &b); err != nil || !strings.HasPrefix(b.NATS, "v2.") || !strings.Contains(b.Platform, "/") {
		t.Errorf("%v: %s", err, out)
	}
	if out, err = command(t, "version", "--of", bin, "--sbom"); err != nil {
		t.Fatal(err)
	}
	var bom bill
	if err := json.Unmarshal([]byte(out), &bom); err != nil {
		t.Fatal(err)
	}
	listed, err := exec.Command("go", "version", "-m", bin).Output()
	if err != nil {
		t.Fatal(err)
	}
	modules := regexp.MustCompile(`(?m)^\tdep\t(\S+)\t(\S+)`).FindAllSubmatch(listed, -1)
	if len(bom.Components) != len(modules)+1 || len(modules) < 10 {
		t.Errorf("%d parts listed, the binary has %d modules", len(bom.Components), len(modules))
	}
	for _, m := range modules {
		mustContain(t, out, `"pkg:golang/`+string(m[1])+"@"+string(m[2])+`"`)
	}
	if _, err := command(t, "version", "--of", "docs_test.go", "--sbom"); err == nil {
		t.Error("a text is a binary")
	}
}

// Files of a release are text that a packager reads: none is empty.
func TestDeployFilesAreThere(t *testing.T) {
	err := filepath.WalkDir(filepath.Join(repository, "docs"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if info, err := d.Info(); err != nil || info.Size() == 0 {
			t.Errorf("%s is empty (%v)", path, err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
