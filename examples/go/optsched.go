package main

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"
	"time"
)

// Client sends requests to `optsched serve`.
type Client struct {
	URL, Token string
	HTTP       http.Client
}

// Fault is a refusal: the field, its value, and what to do.
type Fault struct {
	Status  int `json:"-"`
	Field   string
	Value   any
	Message string
}

func (f *Fault) Error() string { return fmt.Sprintf("%d: %s", f.Status, f.Message) }

// Post sends a request and decodes the answer. It is sent again, with the same
// content, until the service answers; changes have an id and are applied once.
func (c *Client) Post(path string, body, answer any) error {
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	for attempt := 0; attempt < 6; attempt++ {
		time.Sleep(time.Duration(attempt*attempt) * 50 * time.Millisecond)
		var request *http.Request
		request, err = http.NewRequest("POST", c.URL+path, bytes.NewReader(data))
		if err != nil {
			return err
		}
		request.Header.Set("Content-Type", "application/json")
		if c.Token != "" {
			request.Header.Set("Authorization", "Bearer "+c.Token)
		}
		var response *http.Response
		if response, err = c.HTTP.Do(request); err != nil {
			continue
		}
		refusal := struct{ Error *Fault }{&Fault{Status: response.StatusCode}}
		into := answer
		if response.StatusCode != 200 {
			into, err = &refusal, refusal.Error
		}
		if e := json.NewDecoder(response.Body).Decode(into); e != nil {
			err = e
		}
		response.Body.Close()
		if response.StatusCode != 503 {
			return err
		}
	}
	return err
}

// NewID names a request, so that it is applied once however often it is sent.
func NewID() string {
	id := make([]byte, 12)
	rand.Read(id)
	return fmt.Sprintf("%x", id)
}
