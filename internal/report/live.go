package report

import (
	"context"
	"io"
	"slices"
	"strings"

	tea "charm.land/bubbletea/v2"
)

// Live is a Display that redraws a few lines of a terminal.
//
// It takes no input: the terminal stays as it is, so that Ctrl-C reaches the
// program as a signal and ends the measurement through its context.
type Live struct {
	program *tea.Program
	done    chan struct{} // closed when the program has ended
}

// NewLive starts a display on a terminal. It ends with ctx or Close.
func NewLive(ctx context.Context, w io.Writer) *Live { return newLive(ctx, w) }

// newLive is NewLive with more options, for tests without a terminal.
func newLive(ctx context.Context, w io.Writer, more ...tea.ProgramOption) *Live {
	l := &Live{done: make(chan struct{})}
	opts := []tea.ProgramOption{tea.WithContext(ctx), tea.WithOutput(w), tea.WithInput(nil), tea.WithoutSignalHandler(), tea.WithFPS(10)}
	l.program = tea.NewProgram(board{width: 120}, append(opts, more...)...)
	go func() {
		defer close(l.done)
		// The only errors are the context's end and a terminal that is gone;
		// neither concerns the measurement.
		_, _ = l.program.Run()
	}()
	return l
}

type (
	stageMsg string
	eventMsg string
	rowsMsg  []Row
)

// Stage implements Display.
func (l *Live) Stage(text string) { l.program.Send(stageMsg(text)) }

// Event implements Display.
func (l *Live) Event(line string) { l.program.Send(eventMsg(line)) }

// Rows implements Display.
func (l *Live) Rows(rows []Row) { l.program.Send(rowsMsg(slices.Clone(rows))) }

// Close implements Display.
func (l *Live) Close() {
	l.program.Quit()
	<-l.done
}

// shownEvents is how many of the last events the display keeps.
const shownEvents = 6

// board is the display's state, owned by the program's goroutine.
type board struct {
	stage  string
	rows   []Row
	events []string
	width  int
}

func (b board) Init() tea.Cmd { return nil }

func (b board) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch m := msg.(type) {
	case stageMsg:
		b.stage = string(m)
	case rowsMsg:
		b.rows = m
	case eventMsg:
		b.events = append(slices.Clone(b.events), strings.ReplaceAll(string(m), "\n", " "))
		if n := len(b.events); n > shownEvents {
			b.events = b.events[n-shownEvents:]
		}
	case tea.WindowSizeMsg:
		b.width = m.Width
	}
	return b, nil
}

func (b board) View() tea.View { return tea.NewView(frame(b.stage, b.rows, b.events, b.width)) }
