package prefetch

import "testing"

func TestTheKindOfACommandIsTheProgramsThatItRuns(t *testing.T) {
	t.Parallel()
	for command, want := range map[string]string{
		"ls -la && git log --oneline": "git",
		"ls -la | head":               "ls",
		"cd /x && ls":                 "ls",
		"cd /x":                       "cd",
		"cd /x; PYTHONPATH=. /usr/bin/python3 -m pytest -q a.py 2>&1 | tail": "python3 -m pytest",
		"python3 - <<'EOF'\nimport os; grep\nEOF":                            "python3",
		"grep -rn 'a|b; sed' . | sed -n 1,5p":                                "grep+sed",
		"sed -i s/a/b/ f && git diff && grep x":                              "git+sed",
		"cat > f.py <<'EOF'\nx\nEOF":                                         "cat",
		"":                                                                   "",
		"\"$X\" 'y":                                                          "",
		"A=1":                                                                "",
	} {
		if got := KindOf(command); got != want {
			t.Errorf("%q: %q, want %q", command, got, want)
		}
	}
}
