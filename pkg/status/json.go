package status

import (
	"bytes"
	"encoding/json"
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// JSON renders a message on one line, or indented, with every field. Its
// spacing is stable, which that of protojson is not.
func JSON(m proto.Message, indented bool) (string, error) {
	raw, err := protojson.MarshalOptions{EmitUnpopulated: true}.Marshal(m)
	if err != nil {
		return "", fmt.Errorf("status as JSON: %w", err)
	}
	var b bytes.Buffer
	if indented {
		err = json.Indent(&b, raw, "", "  ")
	} else {
		err = json.Compact(&b, raw)
	}
	if err != nil {
		return "", fmt.Errorf("status as JSON: %w", err)
	}
	b.WriteByte('\n')
	return b.String(), nil
}
