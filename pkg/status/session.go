package status

import (
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
)

// directions replaces BIRD's names of NOTIFICATIONs.
var directions = strings.NewReplacer("BGP Error: ", "NOTIFICATION sent: ", "Received: ", "NOTIFICATION received: ")

// sessionProblems returns how the session of a gateway differs from the configuration or failed,
// each with its remedy, and the command that prints the router's side; empty without a problem that
// the router's configuration explains.
func sessionProblems(status *frontendv1.Status, gateway *frontendv1.GatewayStatus, now time.Time) (
	problems []string, next string,
) {
	if gateway.GetWarning() != "" {
		problems = append(problems, gateway.GetWarning())
	}
	add := func(prefix, text string, at *timestamppb.Timestamp) {
		if gateway.GetUp() || text == "" {
			return
		}
		if at != nil {
			text += ", " + ago(at, now) + " ago"
		}
		problems = append(problems, prefix+directions.Replace(text))
	}
	add("down: ", gateway.GetLastError(), gateway.GetLastErrorAt())
	// A router that has refused a session often closes the next connections without a NOTIFICATION.
	if gateway.GetLastNotification() != gateway.GetLastError() {
		add("last ", gateway.GetLastNotification(), gateway.GetLastNotificationAt())
	}
	missing := gateway.GetUp() && gateway.GetExported() < gateway.GetExpected() // a problem of the own BIRD
	// meridio-frontend has no such command.
	if len(problems) > 0 && !missing && !strings.HasPrefix(status.GetConfigurationSource(), "NSP ") {
		next = "compare the router with `frontend gateway-config KIND " + gateway.GetName() + "`"
	}
	return problems, next
}
