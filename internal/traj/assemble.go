package traj

import (
	"encoding/json"
	"time"
)

// mapSteps maps all recorded calls of a trajectory. Calls that touch no sandbox
// and calls that cannot be mapped leave their time behind as think time of the
// next step, because the sandbox waited then.
func mapSteps(t *Trajectory, steps []rawStep, seed uint64) {
	var waited time.Duration
	for i := range steps {
		r := &steps[i]
		if len(r.ArgsRaw) > 0 && json.Unmarshal(r.ArgsRaw, &r.args) != nil {
			r.args = nil // arguments that are no object: nothing to map
		}
		think, drawn := thinkOf(r, seed, t.ID, i)
		s, out := mapStep(*r)
		if out != mapped {
			if out == noSandbox {
				t.Tally.NoSandbox++
			} else {
				t.Tally.Unmappable++
			}
			if !drawn {
				waited += think
			}
			// A sub-agent's own calls follow as steps and happen inside the time
			// of the call that started it.
			if out == noSandbox && r.ExecS != nil && r.Tool != "Task" {
				waited += seconds(*r.ExecS)
			}
			continue
		}
		s.Think, s.Drawn = min(waited+think, maxSeconds*time.Second), drawn
		waited = 0
		if r.StreamS != nil {
			s.Lead = min(seconds(*r.StreamS), s.Think)
		}
		if r.ExecS != nil {
			s.Exec = seconds(*r.ExecS)
		}
		t.Steps = append(t.Steps, s)
		t.Tally.Mapped++
		if s.StandIn {
			t.Tally.StandIns++
		}
		if s.Drawn {
			t.Tally.Drawn++
		}
	}
}

// thinkOf returns the recorded think time before a call, or a drawn one.
func thinkOf(r *rawStep, seed uint64, id string, n int) (d time.Duration, drawn bool) {
	if r.ThinkS != nil {
		return seconds(*r.ThinkS), false
	}
	return drawThink(seed, id, n), true
}
