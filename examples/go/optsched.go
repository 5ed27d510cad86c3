package main

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"
)

// Client sends requests to `optsched serve`.
type Client struct {
	URL, Token string
	HTTP       http.Client
}

// Fault is a refusal: the field, its value, and what to do; or an answer that is
// not one of the service, such as an error page of a proxy.
type Fault struct {
	Status  int `json:"-"`
	Field   string
	Value   any
	Message string
}

func (f *Fault) Error() string { return fmt.Sprintf("%d: %s", f.Status, f.Message) }

// Post sends a request and decodes the answer. It is sent again, with the same
// content, until the service answers, six times at most; changes have an id and
// are applied once.
func (c *Client) Post(path string, body, answer any) error {
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	for attempt := 0; attempt < 6; attempt++ {
		time.Sleep(time.Duration(attempt*attempt) * 50 * time.Millisecond)
		var status int
		var content []byte
		if status, content, err = c.once(path, data); err != nil {
			continue // no answer, or only a part of one
		}
		if status == http.StatusOK {
			return json.Unmarshal(content, answer)
		}
		var refusal struct{ Error *Fault }
		if json.Unmarshal(content, &refusal) != nil || refusal.Error == nil {
			refusal.Error = &Fault{Message: "no answer of optsched serve"}
		}
		refusal.Error.Status = status
		err = refusal.Error
		if status != 502 && status != 503 && status != 504 {
			return err
		}
	}
	return err
}

func (c *Client) once(path string, data []byte) (int, []byte, error) {
	request, err := http.NewRequest("POST", c.URL+path, bytes.NewReader(data))
	if err != nil {
		return 0, nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	if c.Token != "" {
		request.Header.Set("Authorization", "Bearer "+c.Token)
	}
	response, err := c.HTTP.Do(request)
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close()
	content, err := io.ReadAll(response.Body)
	return response.StatusCode, content, err
}

// NewID names a request, so that it is applied once however often it is sent.
func NewID() string {
	id := make([]byte, 12)
	rand.Read(id)
	return fmt.Sprintf("%x", id)
}
