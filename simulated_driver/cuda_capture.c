/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_capture.c - stream capture: from BeginCapture to EndCapture the calls on a stream become nodes of a graph.
 *
 * A capture has one graph and any number of streams: the one where it began, and those that joined by waiting for an event recorded in it.
 * Each stream has a tail: the nodes that the next one will depend on. A call that is not allowed inside a capture invalidates it;
 * EndCapture reports that.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "simulated_driver/cuda_internal.h"

struct sim_capture {
	uint64_t id;
	CUgraph graph;
	bool graph_is_callers;              /* BeginCaptureToGraph */
	CUstreamCaptureMode mode;
	CUstream origin;
	int thread;
	bool invalidated;
	struct captured_stream *streams;
	struct captured_event *events;
};

struct captured_stream {
	CUstream stream;
	struct captured_stream *next;
};

struct captured_event {
	CUevent event;
	struct captured_event *next;
};

/* Over all captures. Taken before graph and memory locks. */
static pthread_mutex_t capture_lock = PTHREAD_MUTEX_INITIALIZER;
_Atomic uint32_t sim_active_captures;
static struct capture_entry {
	struct sim_capture *capture;
	struct capture_entry *next;
} *captures;

static int this_thread(void)
{
	return (int)syscall(SYS_gettid);
}

/* ---- tails ----------------------------------------------------------------------------------------------------------- */

static bool set_tail(CUstream stream, const CUgraphNode *nodes, size_t count)
{
	if (count > stream->tail_capacity) {
		CUgraphNode *grown = realloc(stream->tail, count * sizeof *grown);
		if (!grown)
			return false;
		stream->tail = grown;
		stream->tail_capacity = count;
	}
	if (count)
		memmove(stream->tail, nodes, count * sizeof *nodes);
	stream->n_tail = count;
	return true;
}

static bool add_to_tail(CUstream stream, const CUgraphNode *nodes, size_t count)
{
	size_t before = stream->n_tail;
	CUgraphNode *joined = malloc((before + count + 1) * sizeof *joined);
	if (!joined)
		return false;
	size_t total = 0;
	for (size_t i = 0; i < before; i++)
		joined[total++] = stream->tail[i];
	for (size_t i = 0; i < count; i++) {
		bool known = false;
		for (size_t j = 0; j < before; j++)
			known |= stream->tail[j] == nodes[i];
		if (!known)
			joined[total++] = nodes[i];
	}
	bool ok = set_tail(stream, joined, total);
	free(joined);
	return ok;
}

/* ---- joining and leaving --------------------------------------------------------------------------------------------- */

static bool join(struct sim_capture *capture, CUstream stream)
{
	struct captured_stream *entry = malloc(sizeof *entry);
	if (!entry)
		return false;
	*entry = (struct captured_stream){ stream, capture->streams };
	capture->streams = entry;
	stream->n_tail = 0;
	__atomic_store_n(&stream->capture, capture, __ATOMIC_RELEASE);
	return true;
}

static void forget_event_locked(CUevent event)
{
	free(event->captured_after);
	event->captured_after = NULL;
	event->n_captured_after = 0;
	__atomic_store_n(&event->capture, NULL, __ATOMIC_RELEASE);
}

static void unlist(struct sim_capture *capture)
{
	for (struct capture_entry **at = &captures; *at; at = &(*at)->next)
		if ((*at)->capture == capture) {
			struct capture_entry *entry = *at;
			*at = entry->next;
			free(entry);
			break;
		}
	atomic_fetch_sub(&sim_active_captures, 1);
}

/* Let go of all streams and events; the graph is the caller's business. */
static void finish(struct sim_capture *capture)
{
	while (capture->streams) {
		struct captured_stream *entry = capture->streams;
		capture->streams = entry->next;
		entry->stream->n_tail = 0;
		__atomic_store_n(&entry->stream->capture, NULL, __ATOMIC_RELEASE);
		free(entry);
	}
	while (capture->events) {
		struct captured_event *entry = capture->events;
		capture->events = entry->next;
		if (entry->event->capture == capture)
			forget_event_locked(entry->event);
		sim_event_release(entry->event);
		free(entry);
	}
	unlist(capture);
	free(capture);
}

/* The stream goes away. The capture goes with it where it began; elsewhere it has lost work. */
void sim_capture_abandon(CUstream stream)
{
	pthread_mutex_lock(&capture_lock);
	struct sim_capture *capture = stream->capture;
	if (capture && capture->origin == stream) {
		CUgraph graph = capture->graph_is_callers ? NULL : capture->graph;
		finish(capture);
		if (graph)
			sim_graph_delete(graph);
	} else if (capture) {
		capture->invalidated = true;
		for (struct captured_stream **at = &capture->streams; *at; at = &(*at)->next)
			if ((*at)->stream == stream) {
				struct captured_stream *entry = *at;
				*at = entry->next;
				free(entry);
				break;
			}
		__atomic_store_n(&stream->capture, NULL, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&capture_lock);
}

CUresult sim_capture_refuse(CUstream stream)
{
	pthread_mutex_lock(&capture_lock);
	if (stream->capture)
		stream->capture->invalidated = true;
	pthread_mutex_unlock(&capture_lock);
	return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult sim_capture_unsafe_call_slow(void)
{
	CUresult result = CUDA_SUCCESS;
	if (sim_thread.capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
		return CUDA_SUCCESS;
	int thread = this_thread();
	pthread_mutex_lock(&capture_lock);
	for (struct capture_entry *entry = captures; entry; entry = entry->next) {
		struct sim_capture *capture = entry->capture;
		bool mine = capture->thread == thread && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
		bool global = capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && sim_thread.capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
		if (mine || global) {
			capture->invalidated = true;
			result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
		}
	}
	pthread_mutex_unlock(&capture_lock);
	return result;
}

void sim_capture_forget_event(CUevent event)
{
	if (!__atomic_load_n(&event->capture, __ATOMIC_ACQUIRE))
		return;
	pthread_mutex_lock(&capture_lock);
	if (event->capture)
		forget_event_locked(event);
	pthread_mutex_unlock(&capture_lock);
}

/* ---- begin and end --------------------------------------------------------------------------------------------------- */

static CUresult start(CUstream stream, CUstreamCaptureMode mode, CUgraph graph, const CUgraphNode *dependencies, size_t count)
{
	struct sim_capture *capture = calloc(1, sizeof *capture);
	struct capture_entry *entry = malloc(sizeof *entry);
	bool own_graph = !graph;
	if (own_graph)
		graph = sim_graph_new();
	if (!capture || !entry || !graph || !join(capture, stream) || !set_tail(stream, dependencies, count)) {
		if (capture && capture->streams)
			__atomic_store_n(&stream->capture, NULL, __ATOMIC_RELEASE);
		free(capture ? capture->streams : NULL);
		free(capture);
		free(entry);
		if (own_graph && graph)
			sim_graph_delete(graph);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	capture->id = sim_next_id();
	capture->graph = graph;
	capture->graph_is_callers = !own_graph;
	capture->mode = mode;
	capture->origin = stream;
	capture->thread = this_thread();
	*entry = (struct capture_entry){ capture, captures };
	captures = entry;
	atomic_fetch_add(&sim_active_captures, 1);
	return CUDA_SUCCESS;
}

static CUresult begin(CUstream handle, CUstreamCaptureMode mode, CUgraph graph, const CUgraphNode *dependencies, size_t count)
{
	CUstream stream;
	SIM_REQUIRE((int)mode >= CU_STREAM_CAPTURE_MODE_GLOBAL && mode <= CU_STREAM_CAPTURE_MODE_RELAXED);
	SIM_TRY(sim_stream_of(handle, &stream));
	if (stream->is_legacy)
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	pthread_mutex_lock(&capture_lock);
	CUresult result = stream->capture ? CUDA_ERROR_ILLEGAL_STATE : start(stream, mode, graph, dependencies, count);
	pthread_mutex_unlock(&capture_lock);
	return result;
}

CUresult cuStreamBeginCapture(CUstream s)
{
	return begin(s, CU_STREAM_CAPTURE_MODE_GLOBAL, NULL, NULL, 0);
}
CUresult cuStreamBeginCapture_ptsz(CUstream s)
{
	return begin(sim_own(s), CU_STREAM_CAPTURE_MODE_GLOBAL, NULL, NULL, 0);
}
CUresult cuStreamBeginCapture_v2(CUstream s, CUstreamCaptureMode mode)
{
	return begin(s, mode, NULL, NULL, 0);
}
CUresult cuStreamBeginCapture_v2_ptsz(CUstream s, CUstreamCaptureMode mode)
{
	return begin(sim_own(s), mode, NULL, NULL, 0);
}

static CUresult begin_to_graph(CUstream s, CUgraph graph, const CUgraphNode *dependencies, size_t count, CUstreamCaptureMode mode)
{
	SIM_REQUIRE(sim_is(graph, SIM_KIND_GRAPH) && (count == 0 || dependencies));
	for (size_t i = 0; i < count; i++)
		SIM_REQUIRE(sim_is(dependencies[i], SIM_KIND_NODE) && sim_graph_of_node(dependencies[i]) == graph);
	return begin(s, mode, graph, dependencies, count);
}

CUresult cuStreamBeginCaptureToGraph(CUstream s, CUgraph graph, const CUgraphNode *dependencies, const CUgraphEdgeData *edges, size_t count,
				     CUstreamCaptureMode mode)
{
	(void)edges;
	return begin_to_graph(s, graph, dependencies, count, mode);
}

CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream s, CUgraph graph, const CUgraphNode *dependencies, const CUgraphEdgeData *edges,
					  size_t count, CUstreamCaptureMode mode)
{
	(void)edges;
	return begin_to_graph(sim_own(s), graph, dependencies, count, mode);
}

/* Every stream that joined must have come back: the origin's tail depends on all of its work. */
static bool all_joined(const struct sim_capture *capture)
{
	CUstream origin = capture->origin;
	for (const struct captured_stream *entry = capture->streams; entry; entry = entry->next)
		for (size_t i = 0; entry->stream != origin && i < entry->stream->n_tail; i++) {
			bool reached = false;
			for (size_t j = 0; j < origin->n_tail && !reached; j++)
				reached = sim_graph_leads_to(entry->stream->tail[i], origin->tail[j]);
			if (!reached)
				return false;
		}
	return true;
}

static CUresult judge(const struct sim_capture *capture, CUstream stream)
{
	if (capture->origin != stream)
		return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
	if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != this_thread())
		return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
	if (capture->invalidated)
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	return all_joined(capture) ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
}

static CUresult end(CUstream handle, CUgraph *out)
{
	CUstream stream;
	SIM_TRY(sim_stream_of(handle, &stream));
	pthread_mutex_lock(&capture_lock);
	struct sim_capture *capture = stream->capture;
	CUresult result = capture ? judge(capture, stream) : CUDA_ERROR_ILLEGAL_STATE;
	if (capture && result != CUDA_ERROR_STREAM_CAPTURE_UNMATCHED && result != CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD) {
		CUgraph graph = capture->graph;
		bool keep = result == CUDA_SUCCESS || capture->graph_is_callers;
		finish(capture);
		if (!keep)
			sim_graph_delete(graph);
		if (out)
			*out = result == CUDA_SUCCESS ? graph : NULL;
	} else if (out) {
		*out = NULL;
	}
	pthread_mutex_unlock(&capture_lock);
	return result;
}

CUresult cuStreamEndCapture(CUstream s, CUgraph *graph)
{
	return end(s, graph);
}
CUresult cuStreamEndCapture_ptsz(CUstream s, CUgraph *graph)
{
	return end(sim_own(s), graph);
}

/* ---- queries --------------------------------------------------------------------------------------------------------- */

static CUstreamCaptureStatus status_of(CUstream stream)
{
	if (!stream->capture)
		return CU_STREAM_CAPTURE_STATUS_NONE;
	return stream->capture->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

struct capture_info {
	CUstreamCaptureStatus status;
	cuuint64_t id;
	CUgraph graph;
	const CUgraphNode *tail;
	size_t n_tail;
};

static CUresult describe(CUstream handle, struct capture_info *info)
{
	CUstream stream;
	memset(info, 0, sizeof *info);
	SIM_TRY(sim_stream_of(handle, &stream));
	pthread_mutex_lock(&capture_lock);
	info->status = status_of(stream);
	if (info->status == CU_STREAM_CAPTURE_STATUS_ACTIVE) {
		info->id = stream->capture->id;
		info->graph = stream->capture->graph;
		info->tail = stream->tail;
		info->n_tail = stream->n_tail;
	}
	pthread_mutex_unlock(&capture_lock);
	return CUDA_SUCCESS;
}

static CUresult is_capturing(CUstream s, CUstreamCaptureStatus *status)
{
	struct capture_info info;
	SIM_REQUIRE(status);
	SIM_TRY(describe(s, &info));
	*status = info.status;
	return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *status)
{
	return is_capturing(s, status);
}
CUresult cuStreamIsCapturing_ptsz(CUstream s, CUstreamCaptureStatus *status)
{
	return is_capturing(sim_own(s), status);
}

static CUresult get_info(CUstream s, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **tail,
			 const CUgraphEdgeData **edges, size_t *count)
{
	struct capture_info info;
	SIM_REQUIRE(status);
	SIM_TRY(describe(s, &info));
	*status = info.status;
	if (id)
		*id = info.id;
	if (graph)
		*graph = info.graph;
	if (tail)
		*tail = info.tail;
	if (edges)
		*edges = NULL;      /* all edges are plain */
	if (count)
		*count = info.n_tail;
	return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo(CUstream s, CUstreamCaptureStatus *status, cuuint64_t *id)
{
	return get_info(s, status, id, NULL, NULL, NULL, NULL);
}
CUresult cuStreamGetCaptureInfo_ptsz(CUstream s, CUstreamCaptureStatus *status, cuuint64_t *id)
{
	return get_info(sim_own(s), status, id, NULL, NULL, NULL, NULL);
}
CUresult cuStreamGetCaptureInfo_v2(CUstream s, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **tail,
				   size_t *count)
{
	return get_info(s, status, id, graph, tail, NULL, count);
}
CUresult cuStreamGetCaptureInfo_v2_ptsz(CUstream s, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **tail,
					size_t *count)
{
	return get_info(sim_own(s), status, id, graph, tail, NULL, count);
}
CUresult cuStreamGetCaptureInfo_v3(CUstream s, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **tail,
				   const CUgraphEdgeData **edges, size_t *count)
{
	return get_info(s, status, id, graph, tail, edges, count);
}
CUresult cuStreamGetCaptureInfo_v3_ptsz(CUstream s, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **tail,
					const CUgraphEdgeData **edges, size_t *count)
{
	return get_info(sim_own(s), status, id, graph, tail, edges, count);
}

static CUresult update_dependencies(CUstream handle, const CUgraphNode *nodes, size_t count, unsigned flags)
{
	CUstream stream;
	SIM_REQUIRE((count == 0 || nodes) && flags <= CU_STREAM_SET_CAPTURE_DEPENDENCIES);
	SIM_TRY(sim_stream_of(handle, &stream));
	pthread_mutex_lock(&capture_lock);
	CUresult result = status_of(stream) == CU_STREAM_CAPTURE_STATUS_ACTIVE ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_STATE;
	for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
		if (!sim_is(nodes[i], SIM_KIND_NODE) || sim_graph_of_node(nodes[i]) != stream->capture->graph)
			result = CUDA_ERROR_INVALID_VALUE;
	if (result == CUDA_SUCCESS) {
		bool ok = flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES ? set_tail(stream, nodes, count) : add_to_tail(stream, nodes, count);
		result = ok ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	}
	pthread_mutex_unlock(&capture_lock);
	return result;
}

CUresult cuStreamUpdateCaptureDependencies(CUstream s, CUgraphNode *nodes, size_t count, unsigned int flags)
{
	return update_dependencies(s, nodes, count, flags);
}
CUresult cuStreamUpdateCaptureDependencies_ptsz(CUstream s, CUgraphNode *nodes, size_t count, unsigned int flags)
{
	return update_dependencies(sim_own(s), nodes, count, flags);
}
CUresult cuStreamUpdateCaptureDependencies_v2(CUstream s, CUgraphNode *nodes, const CUgraphEdgeData *edges, size_t count,
					      unsigned int flags)
{
	(void)edges;
	return update_dependencies(s, nodes, count, flags);
}
CUresult cuStreamUpdateCaptureDependencies_v2_ptsz(CUstream s, CUgraphNode *nodes, const CUgraphEdgeData *edges, size_t count,
						   unsigned int flags)
{
	(void)edges;
	return update_dependencies(sim_own(s), nodes, count, flags);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
	SIM_REQUIRE(mode && (int)*mode >= CU_STREAM_CAPTURE_MODE_GLOBAL && *mode <= CU_STREAM_CAPTURE_MODE_RELAXED);
	CUstreamCaptureMode before = sim_thread.capture_mode;
	sim_thread.capture_mode = *mode;
	*mode = before;
	return CUDA_SUCCESS;
}

/* ---- calls that become nodes ----------------------------------------------------------------------------------------- */

/* The new node comes behind the stream's tail and is its new tail. An error ends the capture. */
static CUresult append(CUstream stream, CUresult made, CUgraphNode node)
{
	if (made == CUDA_SUCCESS)
		made = sim_graph_depend(node, stream->tail, stream->n_tail);
	if (made == CUDA_SUCCESS && !set_tail(stream, &node, 1))
		made = CUDA_ERROR_OUT_OF_MEMORY;
	if (made != CUDA_SUCCESS)
		stream->capture->invalidated = true;
	return made;
}

/* Take the lock if the capture still takes nodes. */
static CUresult enter(CUstream stream)
{
	pthread_mutex_lock(&capture_lock);
	if (status_of(stream) == CU_STREAM_CAPTURE_STATUS_ACTIVE)
		return CUDA_SUCCESS;
	CUresult result = stream->capture ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_ILLEGAL_STATE;
	pthread_mutex_unlock(&capture_lock);
	return result;
}

static CUresult leave(CUresult result)
{
	pthread_mutex_unlock(&capture_lock);
	return result;
}

CUresult sim_capture_kernel(CUstream stream, CUfunction function, const struct sim_launch *launch)
{
	CUgraphNode node = NULL;
	SIM_TRY(enter(stream));
	CUresult made = sim_graph_add_kernel(stream->capture->graph, function, stream->context, launch, &node);
	return leave(append(stream, made, node));
}

CUresult sim_capture_copy(CUstream stream, const CUDA_MEMCPY3D *copy)
{
	CUgraphNode node = NULL;
	SIM_TRY(enter(stream));
	CUresult made = sim_graph_add_copy(stream->capture->graph, copy, stream->context, &node);
	return leave(append(stream, made, node));
}

CUresult sim_capture_fill(CUstream stream, const CUDA_MEMSET_NODE_PARAMS *fill)
{
	CUgraphNode node = NULL;
	SIM_TRY(enter(stream));
	CUresult made = sim_graph_add_fill(stream->capture->graph, fill, stream->context, &node);
	return leave(append(stream, made, node));
}

CUresult sim_capture_values(CUstream stream, unsigned count, const CUstreamBatchMemOpParams *operations)
{
	CUDA_BATCH_MEM_OP_NODE_PARAMS batch = { .ctx = stream->context, .count = count, .paramArray = (void *)(uintptr_t)operations };
	CUgraphNode node = NULL;
	SIM_TRY(enter(stream));
	CUresult made = sim_graph_add_values(stream->capture->graph, &batch, stream->context, &node);
	return leave(append(stream, made, node));
}

CUresult sim_capture_host(CUstream stream, CUhostFn run, void *data)
{
	CUgraphNode node = NULL;
	SIM_TRY(enter(stream));
	CUresult made = sim_graph_add_host(stream->capture->graph, run, data, &node);
	return leave(append(stream, made, node));
}

CUresult sim_capture_allocate(CUstream stream, const CUmemPoolProps *properties, size_t bytes, CUdeviceptr *out)
{
	CUgraphNode node = NULL;
	SIM_TRY(enter(stream));
	CUresult made = sim_graph_add_allocation(stream->capture->graph, properties, bytes, out, &node);
	return leave(append(stream, made, node));
}

CUresult sim_capture_free(CUstream stream, CUdeviceptr address)
{
	CUgraphNode node = NULL;
	SIM_TRY(enter(stream));
	CUresult made = sim_graph_add_free(stream->capture->graph, address, &node);
	return leave(append(stream, made, node));
}

CUresult sim_capture_graph(CUstream stream, CUgraph graph)
{
	CUgraphNode node = NULL;
	SIM_TRY(enter(stream));
	CUresult made = sim_graph_add_child(stream->capture->graph, graph, &node);
	return leave(append(stream, made, node));
}

/* The event remembers where in the capture it was recorded. The capture keeps a reference, so that it can clear that when it ends. */
CUresult sim_capture_event_record(CUstream stream, CUevent event)
{
	SIM_TRY(enter(stream));
	struct captured_event *entry = malloc(sizeof *entry);
	CUgraphNode *after = malloc((stream->n_tail + 1) * sizeof *after);
	if (!entry || !after) {
		free(entry);
		free(after);
		stream->capture->invalidated = true;
		return leave(CUDA_ERROR_OUT_OF_MEMORY);
	}
	if (stream->n_tail)
		memcpy(after, stream->tail, stream->n_tail * sizeof *after);
	if (event->capture)
		forget_event_locked(event);
	event->captured_after = after;
	event->n_captured_after = stream->n_tail;
	__atomic_store_n(&event->capture, stream->capture, __ATOMIC_RELEASE);
	atomic_fetch_add(&event->references, 1);
	*entry = (struct captured_event){ event, stream->capture->events };
	stream->capture->events = entry;
	return leave(CUDA_SUCCESS);
}

static CUresult wait_locked(CUstream stream, CUevent event)
{
	struct sim_capture *theirs = event->capture, *ours = stream->capture;
	if (ours && ours->invalidated)
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	if (!theirs) {
		if (sim_event_recorded(event) == 0)
			return CUDA_SUCCESS;    /* never recorded: nothing to wait for */
		ours->invalidated = true;
		return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
	}
	if (stream->is_legacy) {
		theirs->invalidated = true;
		return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
	}
	if (ours && ours != theirs) {
		ours->invalidated = theirs->invalidated = true;
		return CUDA_ERROR_STREAM_CAPTURE_MERGE;
	}
	bool ok = (ours || join(theirs, stream)) && add_to_tail(stream, event->captured_after, event->n_captured_after);
	return ok ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult sim_capture_event_wait(CUstream stream, CUevent event)
{
	pthread_mutex_lock(&capture_lock);
	CUresult result = stream->capture || event->capture ? wait_locked(stream, event) : CUDA_SUCCESS;
	pthread_mutex_unlock(&capture_lock);
	return result;
}
