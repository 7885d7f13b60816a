package template

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/agentzip/agentzip/internal/template/interpreter"
	"github.com/agentzip/agentzip/internal/template/rootfs"
	"github.com/agentzip/agentzip/internal/units"
	"github.com/agentzip/agentzip/internal/vmm"
)

// Suite is the Debian release built-in templates are made of.
const Suite = "bookworm"

// basePackages are in every built-in template. Essential ones (bash, coreutils, grep, sed, tar) come by themselves.
var basePackages = []string{
	"ca-certificates", "findutils", "git", "iproute2", "less", "patch", "procps", "python3", "sudo",
}

// gitConfig makes git usable for an agent that never heard of it: an identity, and no
// housekeeping in the background of a sandbox.
const gitConfig = `cat > /etc/gitconfig <<'EOF'
[user]
	name = user
	email = user@sandbox.invalid
[init]
	defaultBranch = main
[advice]
	detachedHead = false
[gc]
	auto = 0
[maintenance]
	auto = false
[safe]
	directory = *
EOF
`

// tornadoSetup makes /testbed, a git repository with Debian's copy of tornado and its tests. One package
// version gives one commit. Sources are compiled after the commit, with the times they have in the image, so
// that no clone compiles them again.
const tornadoSetup = `mkdir /testbed
cp -a /usr/lib/python3/dist-packages/tornado /testbed/tornado
find /testbed -depth -name __pycache__ -exec rm -rf {} +
printf '%s\n' '__pycache__/' '*.pyc' '.pytest_cache/' > /testbed/.gitignore
printf '%s\n' '[pytest]' 'python_files = *_test.py' 'testpaths = tornado/test' > /testbed/pytest.ini
printf '%s\n' '# tornado' '' 'Tornado is a Python web framework and asynchronous networking library.' '' \
  'Run the tests with: python3 -m pytest tornado/test' > /testbed/README.md
export GIT_AUTHOR_DATE='2024-01-01T00:00:00Z' GIT_COMMITTER_DATE='2024-01-01T00:00:00Z'
git -C /testbed init -q
git -C /testbed add -A
git -C /testbed commit -q -m "tornado $(dpkg-query -W -f '${Version}' python3-tornado)"
python3 -m compileall -q /testbed/tornado
chown -R 1000:1000 /testbed
`

var builtins = map[string]func() BuildSpec{
	"base": func() BuildSpec {
		return BuildSpec{
			Source:   Source{Debian: &rootfs.Debian{Suite: Suite, Packages: append(slices.Clone(basePackages), "curl"), Setup: []string{gitConfig}}},
			Hardware: vmm.Hardware{Network: true},
			WarmUp: []string{
				`curl --version`,
				`python3 -c 'import json, re, argparse, subprocess, unittest, asyncio'`,
				`git --version && ls -la / > /dev/null && ps aux > /dev/null`,
				`sudo -n true`,
			},
		}
	},
	"code-interpreter-v1": func() BuildSpec {
		return BuildSpec{
			Source: Source{Debian: &rootfs.Debian{
				Suite: Suite,
				Packages: append(slices.Clone(basePackages), "curl",
					"python3-ipykernel", "python3-jupyter-client", "python3-matplotlib", "python3-pandas", "python3-pip"),
				Setup: []string{gitConfig, interpreter.Setup()},
			}},
			Hardware: vmm.Hardware{Network: true, Memory: units.GiB},
			WarmUp:   []string{`git --version && ps aux > /dev/null`, `sudo -n true`},
			Start:    interpreter.Start,
			Ready:    interpreter.Ready,
		}
	},
	"tornado": func() BuildSpec {
		return BuildSpec{
			Source: Source{Debian: &rootfs.Debian{
				Suite:    Suite,
				Packages: append(slices.Clone(basePackages), "python3-pytest", "python3-tornado", "ripgrep"),
				Setup:    []string{gitConfig, tornadoSetup},
			}},
			WorkDir: "/testbed",
			WarmUp: []string{
				`python3 -c 'import json, re, argparse, subprocess, unittest, asyncio'`,
				`python3 -m pytest --version`,
				`git status --short && git log --oneline -3 | cat && git diff --stat | cat`,
				`grep -rn "class .*Handler" tornado | wc -l && rg -n "def get" tornado | wc -l && find . -name '*.py' | wc -l && sed -n 1,80p tornado/web.py > /dev/null && ls -la tornado > /dev/null`,
				`python3 -m pytest -q tornado/test/escape_test.py tornado/test/util_test.py`,
				`sudo -n true`,
			},
		}
	},
}

// BuiltinNames lists the templates AgentZip knows how to build by name.
func BuiltinNames() []string { return slices.Sorted(maps.Keys(builtins)) }

// Builtin returns the description of a built-in template, for Build; the caller
// adds the Launcher and may change the rest.
func Builtin(name string) (BuildSpec, error) {
	describe, ok := builtins[name]
	if !ok {
		return BuildSpec{}, fmt.Errorf("no built-in template %q (there are %s): %w", name, strings.Join(BuiltinNames(), ", "), ErrNotFound)
	}
	spec := describe()
	spec.Name = name
	return spec, nil
}
