// Start a job of 8 GPUs on the live cluster "main", and end it.
//
//	go run . http://127.0.0.1:8765 main
package main

import (
	"fmt"
	"os"
	"time"
)

type object = map[string]any

type changed struct {
	Version, Free int
	Started       map[string]struct {
		GPUs      string
		Bandwidth float64
	}
}

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: go run . http://127.0.0.1:8765 CLUSTER")
		os.Exit(2)
	}
	client := Client{URL: os.Args[1], Token: os.Getenv("OPTSCHED_TOKEN")}
	client.HTTP.Timeout = 10 * time.Second
	path := "/v1/clusters/" + os.Args[2] + "/changes"
	take := object{"id": NewID(), "start": []object{{"name": "train", "gpus": 8, "pod": 4}}}
	var first, second, last changed
	for _, answer := range []*changed{&first, &second} { // the second is a retry: the same answer
		if err := client.Post(path, take, answer); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	if first.Version != second.Version {
		panic("a repeated request was applied twice")
	}
	job := first.Started["train"]
	fmt.Printf("train runs on %s at %.1f GB/s, %d GPUs are free\n", job.GPUs, job.Bandwidth, first.Free)
	if err := client.Post(path, object{"id": NewID(), "give": []string{"train"}}, &last); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Printf("train ended, %d GPUs are free\n", last.Free)
}
