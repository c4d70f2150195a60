// SPDX-License-Identifier: Apache-2.0

// Kubernetes' own allocator of ResourceClaims, for tests that compare with it: it reads one case in each line of its input, and writes what
// kube-scheduler would allocate on the node to one line of its output.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

type allocated struct {
	Driver, Pool, Device string
	// Consumed is absent for a device that one claim has alone.
	Consumed map[resourceapi.QualifiedName]resource.Quantity
}

type problem struct {
	Node      string
	Classes   []*resourceapi.DeviceClass
	Slices    []*resourceapi.ResourceSlice
	Claims    []*resourceapi.ResourceClaim
	Allocated []allocated
}

type answer struct {
	// Results has the devices of each claim; absent where they do not fit.
	Results [][]resourceapi.DeviceRequestAllocationResult `json:"results"`
	Error   string                                        `json:"error,omitempty"`
}

type classes map[string]*resourceapi.DeviceClass

func (c classes) List() ([]*resourceapi.DeviceClass, error) {
	var all []*resourceapi.DeviceClass
	for _, class := range c {
		all = append(all, class)
	}
	return all, nil
}

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	if class, found := c[name]; found {
		return class, nil
	}
	return nil, fmt.Errorf("no DeviceClass %s", name)
}

// features are those that are on by default in this version of Kubernetes.
var features = structured.Features{
	AdminAccess:            true,
	ConsumableCapacity:     true,
	DeviceBindingAndStatus: true,
	DeviceTaints:           true,
	PartitionableDevices:   true,
	PrioritizedList:        true,
}

func stateOf(devices []allocated) structured.AllocatedState {
	state := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, one := range devices {
		id := structured.MakeDeviceID(one.Driver, one.Pool, one.Device)
		if one.Consumed == nil {
			state.AllocatedDevices.Insert(id)
			continue
		}
		state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, one.Consumed))
	}
	return state
}

func solve(ctx context.Context, cache *cel.Cache, line []byte) answer {
	var asked problem
	if err := json.Unmarshal(line, &asked); err != nil {
		return answer{Error: err.Error()}
	}
	known := classes{}
	for _, class := range asked.Classes {
		known[class.Name] = class
	}
	allocator, err := structured.NewAllocator(ctx, features, stateOf(asked.Allocated), known, asked.Slices, cache)
	if err != nil {
		return answer{Error: err.Error()}
	}
	node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: asked.Node}}
	found, err := allocator.Allocate(ctx, node, asked.Claims)
	if errors.Is(err, structured.ErrFailedAllocationOnNode) {
		return answer{}
	}
	if err != nil {
		return answer{Error: err.Error()}
	}
	var reply answer
	for _, one := range found {
		reply.Results = append(reply.Results, one.Devices.Results)
	}
	return reply
}

func main() {
	ctx := context.Background()
	cache := cel.NewCache(100, cel.Features{EnableConsumableCapacity: true})
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 64<<20)
	out := bufio.NewWriter(os.Stdout)
	for lines.Scan() {
		written, err := json.Marshal(solve(ctx, cache, lines.Bytes()))
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		out.Write(append(written, '\n'))
		out.Flush()
	}
}
