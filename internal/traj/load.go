package traj

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Limits on recorded files. The largest real line is 0.5 MB, the largest set
// 7.5 MB; past these a file is refused, not cut.
const (
	maxLine  = 16 << 20
	maxTotal = 512 << 20
	maxFiles = 64
	maxSteps = 10_000
	maxRuns  = 20_000
)

// A Selection says which recorded trajectories to load.
type Selection struct {
	Path     string // a .jsonl or .jsonl.gz file, or a folder of them (two levels)
	Group    string // a group of groups.json beside the files; "" takes all
	Match    string // only ids, tasks or repositories that contain it
	Exclude  string // not ids that contain it
	MinSteps int    // only trajectories with at least so many steps
	Seed     uint64 // for drawn think times
}

// ErrNone says that the files are readable but no trajectory was selected.
var ErrNone = errors.New("no trajectory selected")

// Load reads the selected trajectories in the order of the group, or of the
// files (sorted by name) and lines.
func Load(sel Selection) ([]Trajectory, error) {
	files, err := listFiles(sel.Path)
	if err != nil {
		return nil, err
	}
	var members []string
	if sel.Group != "" {
		if members, err = groupMembers(sel.Path, sel.Group); err != nil {
			return nil, err
		}
	}
	keep := func(r *rawRun) bool {
		switch {
		case members != nil && !slices.Contains(members, r.ID),
			sel.Match != "" && !strings.Contains(r.ID+"\n"+r.Task+"\n"+r.Repo, sel.Match),
			sel.Exclude != "" && strings.Contains(r.ID, sel.Exclude):
			return false
		}
		return true
	}
	var out []Trajectory
	seen, budget := 0, int64(maxTotal)
	for _, file := range files {
		runs, read, err := loadFile(file, sel, keep, &budget)
		if err != nil {
			return nil, err
		}
		seen += read
		out = append(out, runs...)
		if len(out) > maxRuns {
			return nil, fmt.Errorf("load trajectories of %s: more than %d", sel.Path, maxRuns)
		}
	}
	if members != nil {
		slices.SortStableFunc(out, func(a, b Trajectory) int {
			return slices.Index(members, a.ID) - slices.Index(members, b.ID)
		})
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("load trajectories of %s: %d read: %w", sel.Path, seen, ErrNone)
	}
	return out, nil
}

// listFiles returns the trajectory files of a path, sorted.
func listFiles(p string) ([]string, error) {
	st, err := os.Stat(p)
	if err != nil {
		return nil, fmt.Errorf("find trajectories: %w", err)
	}
	if !st.IsDir() {
		return []string{p}, nil
	}
	var files []string
	err = filepath.WalkDir(p, func(q string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, rerr := filepath.Rel(p, q)
		if rerr != nil {
			return rerr
		}
		if d.IsDir() {
			if rel != "." && strings.Count(rel, string(filepath.Separator)) >= 2 {
				return fs.SkipDir
			}
			return nil
		}
		if name := d.Name(); strings.HasPrefix(name, "trajector") && (strings.HasSuffix(name, ".jsonl") || strings.HasSuffix(name, ".jsonl.gz")) {
			files = append(files, q)
		}
		if len(files) > maxFiles {
			return fmt.Errorf("more than %d trajectory files", maxFiles)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("find trajectories in %s: %w", p, err)
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("find trajectories in %s: no trajector*.jsonl or trajector*.jsonl.gz file", p)
	}
	return files, nil
}

// groupMembers reads groups.json in the folder, or beside or above the file.
func groupMembers(p, group string) ([]string, error) {
	dir := p
	if st, err := os.Stat(p); err == nil && !st.IsDir() {
		dir = filepath.Dir(p)
	}
	var data []byte
	var err error
	for _, d := range []string{dir, filepath.Dir(filepath.Clean(dir))} {
		if data, err = readLimited(filepath.Join(d, "groups.json"), maxLine); err == nil {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("read groups: %w", err)
	}
	var groups []struct {
		Group   string   `json:"group"`
		Members []string `json:"members"`
	}
	if err := json.Unmarshal(data, &groups); err != nil {
		return nil, fmt.Errorf("parse groups.json: %w", err)
	}
	var names []string
	for _, g := range groups {
		if g.Group == group {
			return g.Members, nil
		}
		names = append(names, g.Group)
	}
	return nil, fmt.Errorf("no group %q in groups.json; there are %s", group, strings.Join(names, ", "))
}

func readLimited(file string, limit int64) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("%s is larger than %d bytes", file, limit)
	}
	return data, err
}

// loadFile reads one file, taking what it decompresses to from the budget.
func loadFile(file string, sel Selection, keep func(*rawRun) bool, budget *int64) ([]Trajectory, int, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, 0, fmt.Errorf("open trajectories: %w", err)
	}
	defer f.Close()
	return decode(f, file, sel, keep, budget)
}

// decode reads trajectories from r, one JSON object a line, plain or gzip'd.
// name is for messages.
func decode(r io.Reader, name string, sel Selection, keep func(*rawRun) bool, budget *int64) ([]Trajectory, int, error) {
	br := bufio.NewReaderSize(r, 64<<10)
	if magic, _ := br.Peek(2); bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(br)
		if err != nil {
			return nil, 0, fmt.Errorf("open %s: %w", name, err)
		}
		br = bufio.NewReaderSize(z, 64<<10)
	}
	var out []Trajectory
	read := 0
	for line := 1; ; line++ {
		text, err := readLine(br)
		*budget -= int64(len(text))
		if *budget < 0 {
			return nil, read, fmt.Errorf("%s:%d: more than %d MB of trajectories", name, line, maxTotal>>20)
		}
		last := errors.Is(err, io.EOF)
		if err != nil && !last {
			return nil, read, fmt.Errorf("%s:%d: %w", name, line, err)
		}
		if text = bytes.TrimSpace(text); len(text) > 0 {
			read++
			t, ok, perr := parseRun(text, sel, keep)
			if perr != nil {
				return nil, read, fmt.Errorf("%s:%d: %w", name, line, perr)
			}
			if ok {
				out = append(out, t)
			}
		}
		if last {
			return out, read, nil
		}
	}
}

// readLine reads up to and with the next newline, at most maxLine bytes.
func readLine(br *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := br.ReadSlice('\n')
		if len(line)+len(part) > maxLine {
			return nil, fmt.Errorf("line is longer than %d MB", maxLine>>20)
		}
		line = append(line, part...)
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, err
		}
	}
}

// rawRun is one recorded trajectory.
type rawRun struct {
	ID    string          `json:"id"`
	Task  string          `json:"task"`
	Repo  string          `json:"repo"`
	Steps json.RawMessage `json:"steps"`
	// Sessions of which no commands were kept have events instead of steps.
	Events json.RawMessage `json:"events"`
}

// parseRun parses one line and maps its steps. ok is false when the selection
// leaves it out.
func parseRun(text []byte, sel Selection, keep func(*rawRun) bool) (t Trajectory, ok bool, err error) {
	var raw rawRun
	if err := json.Unmarshal(text, &raw); err != nil {
		return t, false, fmt.Errorf("parse trajectory: %w", err)
	}
	if raw.Steps == nil && raw.Events != nil {
		return t, false, errors.New("records when tools ran but no commands; it cannot be replayed")
	}
	if raw.ID == "" {
		return t, false, errors.New(`parse trajectory: no "id"`)
	}
	if !keep(&raw) {
		return t, false, nil
	}
	var steps []rawStep
	if err := json.Unmarshal(raw.Steps, &steps); err != nil {
		return t, false, fmt.Errorf("parse steps of %s: %w", raw.ID, err)
	}
	if len(steps) > maxSteps {
		return t, false, fmt.Errorf("trajectory %s has %d steps, more than %d", raw.ID, len(steps), maxSteps)
	}
	t = Trajectory{ID: raw.ID, Task: raw.Task, Repo: raw.Repo}
	mapSteps(&t, steps, sel.Seed)
	return t, len(t.Steps) >= max(1, sel.MinSteps), nil
}
