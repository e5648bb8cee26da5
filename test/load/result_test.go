package load

import (
	"testing"
	"time"
)

func TestTables(t *testing.T) {
	r := Result{
		Sent: 1200, Answered: 1199, Failed: 1, Slowest: 1003 * time.Millisecond,
		Flows: []Flow{
			{Number: 0, Target: "target-1", LongestGap: 2 * time.Second, Broken: "EOF"},
			{Number: 1, Target: "target-2", LongestGap: 21 * time.Millisecond},
		},
	}
	table := Table(Row{"rolling restart", r, []string{"target-1"}}, Row{"control", r, nil})
	want := `                   sent  answered  failed  flows  broken  of leavers  longest gap  slowest answer
  rolling restart  1200      1199       1      2       0           1        21 ms         1003 ms
  control          1200      1199       1      2       1           0      2000 ms         1003 ms
`
	if table != want {
		t.Errorf("got\n%s\nwant\n%s", table, want)
	}
	beside := SideBySide(Row{"vipgate", r, []string{"target-1"}}, Row{"control", r, nil})
	want = `                  vipgate  control
            sent     1200     1200
        answered     1199     1199
          failed        1        1
           flows        2        2
          broken        0        1
      of leavers        1        0
     longest gap    21 ms  2000 ms
  slowest answer  1003 ms  1003 ms
`
	if beside != want {
		t.Errorf("got\n%s\nwant\n%s", beside, want)
	}
}
