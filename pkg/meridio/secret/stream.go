package secret

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// maxEvent is the maximum size of an event. A Secret has at most 1 MiB of values, encoded in
// Base64, and its metadata.
const maxEvent = 4 << 20

var errTooLarge = fmt.Errorf("an event has more than %d bytes", maxEvent)

// The types of events (k8s.io/apimachinery/pkg/watch).
const (
	typeAdded    = "ADDED"
	typeModified = "MODIFIED"
	typeDeleted  = "DELETED"
	typeBookmark = "BOOKMARK"
	typeError    = "ERROR"
)

// initialEventsEnd is the annotation of the bookmark at the end of the current state.
const initialEventsEnd = "k8s.io/initial-events-end"

// event is one event of a watch: a JSON document, followed by a newline.
type event struct {
	Type   string          `json:"type"`
	Object json.RawMessage `json:"object"`
}

// object holds the decoded fields of a Secret, and of the object of a bookmark.
type object struct {
	Kind     string `json:"kind"`
	Metadata struct {
		Name        string            `json:"name"`
		Annotations map[string]string `json:"annotations"`
	} `json:"metadata"`
	Data map[string][]byte `json:"data"`
}

// status holds the decoded fields of a Status (k8s.io/apimachinery/pkg/apis/meta/v1).
type status struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

type stream struct {
	body    io.Reader
	left    int64 // remaining bytes of the limit for the current event
	decoder *json.Decoder
}

func newStream(body io.Reader) *stream {
	s := &stream{body: body}
	s.decoder = json.NewDecoder(s)
	return s
}

// Read implements io.Reader for the decoder.
func (s *stream) Read(p []byte) (int, error) {
	if s.left <= 0 {
		return 0, errTooLarge
	}
	n, err := s.body.Read(p[:min(int64(len(p)), s.left)])
	s.left -= int64(n)
	return n, err
}

// next returns the next event, or io.EOF if the stream ends between two events.
func (s *stream) next() (event, error) {
	s.left = maxEvent
	var e event
	err := s.decoder.Decode(&e)
	// Do not return decoder errors: they quote the invalid input, which may be a part of a value.
	syntax, kind := (*json.SyntaxError)(nil), (*json.UnmarshalTypeError)(nil)
	switch {
	case errors.Is(err, io.EOF):
		return event{}, io.EOF
	case errors.As(err, &syntax), errors.As(err, &kind):
		return event{}, errors.New("the API server sends what is not an event")
	case err != nil:
		return event{}, fmt.Errorf("the watch was interrupted: %w", err)
	}
	return e, nil
}

func (e event) object() (object, error) {
	var o object
	if json.Unmarshal(e.Object, &o) != nil { // do not return this error, which may quote a value
		return object{}, fmt.Errorf("the API server sends an event %s with a malformed object", quote(e.Type))
	}
	return o, nil
}

// failure returns the error of an ERROR event.
func (e event) failure() error {
	var s status
	if json.Unmarshal(e.Object, &s) != nil {
		return errors.New("the API server sends an event ERROR without a reason")
	}
	return &rejection{code: s.Code, message: s.Message}
}
