package status

import (
	"bytes"
	"encoding/json"
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// JSON renders a message on one line, or indented, with every field. Its spacing is stable, unlike
// that of protojson.
func JSON(m proto.Message, indented bool) (string, error) {
	raw, err := protojson.MarshalOptions{EmitUnpopulated: true}.Marshal(m)
	var b bytes.Buffer
	switch {
	case err != nil:
	case indented:
		err = json.Indent(&b, raw, "", "  ")
	default:
		err = json.Compact(&b, raw)
	}
	if err != nil {
		return "", fmt.Errorf("failed to render status as JSON: %w", err)
	}
	b.WriteByte('\n')
	return b.String(), nil
}
