package bench

import "regexp"

// A rule removes from outputs one thing that differs between two runs of the
// same command although nothing is wrong. It must not remove anything else:
// what a rule hides, the comparison cannot see.
type rule struct {
	name string
	from *regexp.Regexp
	to   string
}

// rules are applied in this order. The place for a new rule is here, and a case
// for it in normalise_test.go.
var rules = []rule{
	{"UUIDs", regexp.MustCompile(`\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b`), "UUID"},
	{"memory addresses", regexp.MustCompile(`\b0x[0-9a-fA-F]{6,16}\b`), "0xADDR"},

	{"ISO dates with a time", regexp.MustCompile(`\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?([.,]\d+)?( ?([+-]\d\d:?\d\d|Z\b))?`), "DATE"},
	{"ISO dates", regexp.MustCompile(`\b20\d\d-[01]\d-[0-3]\d\b`), "DATE"},
	{"dates with names", regexp.MustCompile(`\b((Mon|Tue|Wed|Thu|Fri|Sat|Sun),? +)?((Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +\d{1,2}|\d{1,2} (Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)),?( \d{4})? +(\d\d:\d\d(:\d\d)?( (AM|PM))?|\d{4}\b)( ?(UTC|GMT|[+-]\d{4}))?( \d{4}\b)?`), "DATE"},
	{"dates of tornado's log", regexp.MustCompile(`\[([DIWEC]) \d{6} \d\d:\d\d:\d\d `), "[$1 DATE "},
	{"clock times", regexp.MustCompile(`\b\d\d:\d\d:\d\d([.,]\d+)?\b`), "TIME"},
	{"seconds since the epoch", regexp.MustCompile(`\b1[6-9]\d{8}(\.\d+)?\b`), "EPOCH"},

	{"durations of time(1)", regexp.MustCompile(`\b\d+m\d+\.\d+s\b|\b\d+:\d\d\.\d\d?elapsed\b|\b\d+\.\d\d(user|system)\b|\b\d+%CPU\b|\b\d+maxresident\b`), "DURATION"},
	{"durations", regexp.MustCompile(`\b\d+(\.\d+)?(e-\d+)? ?(ns|us|µs|ms|s|secs?|seconds?)\b( \(\d:\d\d:\d\d\))?`), "DURATION"},
	{"rates", regexp.MustCompile(`\b\d+(\.\d+)? ?([kKMG]i?)?B/s`), "RATE"},
	// pytest pads its banners to the width of the line, which the duration in
	// them changes.
	{"banners", regexp.MustCompile(`(={2,}|-{2,}|_{2,})( .*DURATION.* )(={2,}|-{2,}|_{2,})`), "==$2=="},

	{"process ids", regexp.MustCompile(`(?i)\b(pid|process|server process|worker)([ =:#]+)\d+\b`), "$1${2}PID"},
	{"job numbers", regexp.MustCompile(`(?m)^\[\d+\] \d+$`), "[JOB] PID"},
	{"thread ids", regexp.MustCompile(`\b(Thread|ThreadId|tid|ident)([-=: (]+)\d{5,}`), "$1${2}TID"},

	{"names of pytest's folders", regexp.MustCompile(`pytest-of-\w+/pytest-\d+`), "pytest-of-USER/pytest-N"},
	{"temporary names", regexp.MustCompile(`\btmp[a-z0-9_]{8}\b|\btmp\.[A-Za-z0-9]{6,12}\b|\b(pip|uv)-[a-z-]+-[a-z0-9_]{8}\b`), "TMP"},
	{"port numbers", regexp.MustCompile(`\b(127\.0\.0\.1|0\.0\.0\.0|localhost|\[::1?\])(:|', )\d{4,5}\b`), "$1${2}PORT"},
	{"named ports", regexp.MustCompile(`(?i)\b(port)([ =:]+)\d{5}\b`), "$1${2}PORT"},

	// A commit made during the replay has the time in its id.
	{"ids of new commits", regexp.MustCompile(`(?m)^\[([^\]\n]+) [0-9a-f]{7,12}\]`), "[$1 COMMIT]"},
	{"commit ids", regexp.MustCompile(`\b(commit|at|tree|parent|\() ?[0-9a-f]{40}\b`), "$1 COMMIT"},
	{"short commit ids", regexp.MustCompile(`(?m)^(HEAD is now at )?[0-9a-f]{7,12} `), "${1}COMMIT "},
}

// normalise removes from an output what depends on time.
func normalise(out []byte) []byte {
	for _, r := range rules {
		out = r.from.ReplaceAll(out, []byte(r.to))
	}
	return out
}
