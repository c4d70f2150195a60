/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_stream.c - streams, the default ones included, events, and host functions. Queues and time are in engine.c, capture in
 * cuda_capture.c. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "simulated_driver/cuda_internal.h"

#define PRIORITY_GREATEST (-5)

/* ---- default streams ------------------------------------------------------------------------------------------------- */

static void set_up(CUstream stream, CUcontext context, unsigned flags, int priority)
{
	stream->context = context;
	stream->engine = &context->device->engine;
	stream->id = sim_next_id();
	stream->flags = flags;
	stream->priority = priority > 0 ? 0 : priority < PRIORITY_GREATEST ? PRIORITY_GREATEST : priority;
}

void sim_stream_init_legacy(CUcontext context)
{
	context->legacy.object.magic = SIM_MAGIC | SIM_KIND_STREAM;
	context->legacy.is_legacy = true;
	set_up(&context->legacy, context, CU_STREAM_DEFAULT, 0);
}

static CUstream stream_new(CUcontext context, unsigned flags, int priority)
{
	CUstream stream = sim_object_new(SIM_KIND_STREAM, sizeof *stream);
	if (stream)
		set_up(stream, context, flags, priority);
	return stream;
}

/* Link into the context; sim_context_lock is held. */
static void link_to_context(CUstream stream)
{
	stream->next_of_context = stream->context->streams;
	stream->context->streams = stream;
}

static void unlink_from_context(CUstream stream)
{
	for (CUstream *at = &stream->context->streams; *at; at = &(*at)->next_of_context)
		if (*at == stream) {
			*at = stream->next_of_context;
			return;
		}
}

void sim_streams_delete(CUcontext context)
{
	while (context->streams) {
		CUstream stream = context->streams;
		context->streams = stream->next_of_context;
		if (sim_capturing(stream))
			sim_capture_abandon(stream);
		sim_engine_retire_stream(stream);
	}
	sim_engine_empty_legacy(context);
}

/* The calling thread's own stream in this context, made at first use. Threads that end leave theirs to the next one with their id. */
static CUresult per_thread_stream(CUcontext context, CUstream *out)
{
	if (sim_likely(sim_thread.stream && sim_thread.stream_context_id == context->id)) {
		*out = sim_thread.stream;
		return CUDA_SUCCESS;
	}
	int thread = (int)syscall(SYS_gettid);
	pthread_mutex_lock(&sim_context_lock);
	CUstream stream = context->streams;
	while (stream && !(stream->is_per_thread && stream->owner_thread == thread))
		stream = stream->next_of_context;
	if (!stream && (stream = stream_new(context, CU_STREAM_DEFAULT, 0))) {
		stream->is_per_thread = true;
		stream->owner_thread = thread;
		link_to_context(stream);
	}
	pthread_mutex_unlock(&sim_context_lock);
	if (!stream)
		return CUDA_ERROR_OUT_OF_MEMORY;
	sim_thread.stream = stream;
	sim_thread.stream_context_id = context->id;
	*out = stream;
	return CUDA_SUCCESS;
}

CUresult sim_default_stream(CUcontext context, CUstream handle, CUstream *stream)
{
	if (handle == CU_STREAM_PER_THREAD)
		return per_thread_stream(context, stream);
	*stream = &context->legacy;
	return CUDA_SUCCESS;
}

CUresult sim_stream_of(CUstream handle, CUstream *stream)
{
	if ((uintptr_t)handle <= (uintptr_t)CU_STREAM_PER_THREAD) {
		CUcontext context;
		SIM_TRY(sim_current(&context));
		return sim_default_stream(context, handle, stream);
	}
	if (!sim_ready())
		return CUDA_ERROR_NOT_INITIALIZED;
	if (sim_unlikely(!sim_is(handle, SIM_KIND_STREAM)))
		return CUDA_ERROR_INVALID_HANDLE;
	*stream = handle;
	return sim_context_check(handle->context);
}

/* ---- streams --------------------------------------------------------------------------------------------------------- */

CUresult cuStreamCreateWithPriority(CUstream *out, unsigned int flags, int priority)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(out && !(flags & ~(unsigned)CU_STREAM_NON_BLOCKING));
	CUstream stream = stream_new(context, flags, priority);
	if (!stream)
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_lock(&sim_context_lock);
	link_to_context(stream);
	pthread_mutex_unlock(&sim_context_lock);
	*out = stream;
	return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *out, unsigned int flags)
{
	return cuStreamCreateWithPriority(out, flags, 0);
}

CUresult cuStreamDestroy_v2(CUstream handle)
{
	SIM_REQUIRE_READY();
	if ((uintptr_t)handle <= (uintptr_t)CU_STREAM_PER_THREAD || !sim_is(handle, SIM_KIND_STREAM) || handle->is_per_thread)
		return CUDA_ERROR_INVALID_HANDLE;
	if (sim_capturing(handle))
		sim_capture_abandon(handle);
	pthread_mutex_lock(&sim_context_lock);
	unlink_from_context(handle);
	pthread_mutex_unlock(&sim_context_lock);
	sim_engine_retire_stream(handle);
	return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream stream)
{
	return cuStreamDestroy_v2(stream);
}

static CUresult synchronize(CUstream handle)
{
	CUstream stream;
	SIM_TRY(sim_stream_of(handle, &stream));
	if (sim_capturing(stream))
		return sim_capture_refuse(stream);
	CUcontext context = stream->context;
	sim_engine_wait_stream(stream);
	sim_pools_settle(context->device);
	return sim_context_check(context);
}

CUresult cuStreamSynchronize(CUstream s)
{
	return synchronize(s);
}
CUresult cuStreamSynchronize_ptsz(CUstream s)
{
	return synchronize(sim_own(s));
}

static CUresult query(CUstream handle)
{
	CUstream stream;
	SIM_TRY(sim_stream_of(handle, &stream));
	if (sim_capturing(stream))
		return sim_capture_refuse(stream);
	return sim_engine_stream_done(stream) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamQuery(CUstream s)
{
	return query(s);
}
CUresult cuStreamQuery_ptsz(CUstream s)
{
	return query(sim_own(s));
}

static CUresult get_priority(CUstream handle, int *priority)
{
	CUstream stream;
	SIM_REQUIRE(priority);
	SIM_TRY(sim_stream_of(handle, &stream));
	*priority = stream->priority;
	return CUDA_SUCCESS;
}

CUresult cuStreamGetPriority(CUstream s, int *priority)
{
	return get_priority(s, priority);
}
CUresult cuStreamGetPriority_ptsz(CUstream s, int *priority)
{
	return get_priority(sim_own(s), priority);
}

static CUresult get_device(CUstream handle, CUdevice *device)
{
	CUstream stream;
	SIM_REQUIRE(device);
	SIM_TRY(sim_stream_of(handle, &stream));
	*device = stream->context->device->ordinal;
	return CUDA_SUCCESS;
}

CUresult cuStreamGetDevice(CUstream s, CUdevice *device)
{
	return get_device(s, device);
}
CUresult cuStreamGetDevice_ptsz(CUstream s, CUdevice *device)
{
	return get_device(sim_own(s), device);
}

static CUresult get_flags(CUstream handle, unsigned *flags)
{
	CUstream stream;
	SIM_REQUIRE(flags);
	SIM_TRY(sim_stream_of(handle, &stream));
	*flags = stream->flags;
	return CUDA_SUCCESS;
}

CUresult cuStreamGetFlags(CUstream s, unsigned int *flags)
{
	return get_flags(s, flags);
}
CUresult cuStreamGetFlags_ptsz(CUstream s, unsigned int *flags)
{
	return get_flags(sim_own(s), flags);
}

static CUresult get_id(CUstream handle, unsigned long long *id)
{
	CUstream stream;
	SIM_REQUIRE(id);
	SIM_TRY(sim_stream_of(handle, &stream));
	*id = stream->id;
	return CUDA_SUCCESS;
}

CUresult cuStreamGetId(CUstream s, unsigned long long *id)
{
	return get_id(s, id);
}
CUresult cuStreamGetId_ptsz(CUstream s, unsigned long long *id)
{
	return get_id(sim_own(s), id);
}

static CUresult get_context(CUstream handle, CUcontext *context)
{
	CUstream stream;
	SIM_REQUIRE(context);
	SIM_TRY(sim_stream_of(handle, &stream));
	*context = stream->context;
	return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream s, CUcontext *context)
{
	return get_context(s, context);
}
CUresult cuStreamGetCtx_ptsz(CUstream s, CUcontext *context)
{
	return get_context(sim_own(s), context);
}

static CUresult get_context_v2(CUstream handle, CUcontext *context, CUgreenCtx *green)
{
	if (green)
		*green = NULL;
	return get_context(handle, context);
}

CUresult cuStreamGetCtx_v2(CUstream s, CUcontext *context, CUgreenCtx *green)
{
	return get_context_v2(s, context, green);
}
CUresult cuStreamGetCtx_v2_ptsz(CUstream s, CUcontext *context, CUgreenCtx *green)
{
	return get_context_v2(sim_own(s), context, green);
}

/* ---- attributes ------------------------------------------------------------------------------------------------------ */

static CUresult get_attribute(CUstream handle, CUstreamAttrID attribute, CUstreamAttrValue *value)
{
	CUstream stream;
	SIM_REQUIRE(value);
	SIM_TRY(sim_stream_of(handle, &stream));
	switch (attribute) {
	case CU_LAUNCH_ATTRIBUTE_PRIORITY: value->priority = stream->priority; return CUDA_SUCCESS;
	case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW: *value = stream->access_policy; return CUDA_SUCCESS;
	case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY: *value = stream->sync_policy; return CUDA_SUCCESS;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
}

static CUresult set_attribute(CUstream handle, CUstreamAttrID attribute, const CUstreamAttrValue *value)
{
	CUstream stream;
	SIM_REQUIRE(value);
	SIM_TRY(sim_stream_of(handle, &stream));
	switch (attribute) {
	case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW: stream->access_policy = *value; return CUDA_SUCCESS;
	case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY: stream->sync_policy = *value; return CUDA_SUCCESS;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
}

static CUresult copy_attributes(CUstream to_handle, CUstream from_handle)
{
	CUstream to, from;
	SIM_TRY(sim_stream_of(to_handle, &to));
	SIM_TRY(sim_stream_of(from_handle, &from));
	to->access_policy = from->access_policy;
	to->sync_policy = from->sync_policy;
	return CUDA_SUCCESS;
}

/* clang-format off */
CUresult cuStreamGetAttribute(CUstream s, CUstreamAttrID id, CUstreamAttrValue *value) { return get_attribute(s, id, value); }
CUresult cuStreamGetAttribute_ptsz(CUstream s, CUstreamAttrID id, CUstreamAttrValue *value) { return get_attribute(sim_own(s), id, value); }
CUresult cuStreamSetAttribute(CUstream s, CUstreamAttrID id, const CUstreamAttrValue *value) { return set_attribute(s, id, value); }
CUresult cuStreamSetAttribute_ptsz(CUstream s, CUstreamAttrID id, const CUstreamAttrValue *value)
{
	return set_attribute(sim_own(s), id, value);
}
CUresult cuStreamCopyAttributes(CUstream to, CUstream from) { return copy_attributes(to, from); }
CUresult cuStreamCopyAttributes_ptsz(CUstream to, CUstream from) { return copy_attributes(sim_own(to), sim_own(from)); }
/* clang-format on */

/* ---- host functions -------------------------------------------------------------------------------------------------- */

static CUresult launch_host(CUstream handle, CUhostFn run, void *data)
{
	CUstream stream;
	SIM_REQUIRE(run);
	SIM_TRY(sim_stream_of(handle, &stream));
	if (sim_capturing(stream))
		return sim_capture_host(stream, run, data);
	return sim_engine_submit(stream, &(struct sim_work){ .kind = SIM_WORK_HOST, .host = { run, data } });
}

CUresult cuLaunchHostFunc(CUstream s, CUhostFn run, void *data)
{
	return launch_host(s, run, data);
}
CUresult cuLaunchHostFunc_ptsz(CUstream s, CUhostFn run, void *data)
{
	return launch_host(sim_own(s), run, data);
}

static CUresult add_callback(CUstream handle, CUstreamCallback run, void *data, unsigned flags)
{
	CUstream stream;
	SIM_REQUIRE(run && flags == 0);
	SIM_TRY(sim_stream_of(handle, &stream));
	if (sim_capturing(stream))
		return sim_capture_refuse(stream);
	return sim_engine_submit(stream, &(struct sim_work){ .kind = SIM_WORK_CALLBACK, .callback = { run, data } });
}

CUresult cuStreamAddCallback(CUstream s, CUstreamCallback run, void *data, unsigned int flags)
{
	return add_callback(s, run, data, flags);
}
CUresult cuStreamAddCallback_ptsz(CUstream s, CUstreamCallback run, void *data, unsigned int flags)
{
	return add_callback(sim_own(s), run, data, flags);
}

/* ---- events ---------------------------------------------------------------------------------------------------------- */

CUevent sim_event_new(CUcontext context, unsigned flags)
{
	CUevent event = sim_object_new(SIM_KIND_EVENT, sizeof *event);
	if (!event)
		return NULL;
	event->context = context;
	event->flags = flags;
	event->times = &event->own;
	atomic_store(&event->references, 1);
	return event;
}

static bool event_usable(CUevent event)
{
	return sim_is(event, SIM_KIND_EVENT) && !atomic_load(&event->destroyed);
}

CUresult cuEventCreate(CUevent *out, unsigned int flags)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(out && !(flags & ~(unsigned)(CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS)));
	SIM_REQUIRE(!(flags & CU_EVENT_INTERPROCESS) || flags & CU_EVENT_DISABLE_TIMING);
	CUevent event = sim_event_new(context, flags);
	if (!event)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (flags & CU_EVENT_INTERPROCESS && !sim_event_share_new(event)) {
		sim_event_release(event);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*out = event;
	return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event)
{
	SIM_REQUIRE_READY();
	if (!event_usable(event))
		return CUDA_ERROR_INVALID_HANDLE;
	atomic_store(&event->destroyed, true);
	sim_capture_forget_event(event);
	sim_event_release(event);
	return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event)
{
	return cuEventDestroy_v2(event);
}

static CUresult record(CUevent event, CUstream handle)
{
	CUstream stream;
	SIM_TRY(sim_stream_of(handle, &stream));
	if (!event_usable(event))
		return CUDA_ERROR_INVALID_HANDLE;
	if (event->context != stream->context)
		return CUDA_ERROR_INVALID_HANDLE;
	if (sim_capturing(stream))
		return event->share ? sim_capture_refuse(stream) : sim_capture_event_record(stream, event);
	sim_capture_forget_event(event);
	return sim_engine_record(stream, event);
}

CUresult cuEventRecord(CUevent event, CUstream s)
{
	return record(event, s);
}
CUresult cuEventRecord_ptsz(CUevent event, CUstream s)
{
	return record(event, sim_own(s));
}

static CUresult record_with_flags(CUevent event, CUstream handle, unsigned flags)
{
	SIM_REQUIRE(!(flags & ~1u));
	return record(event, handle);
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream s, unsigned int flags)
{
	return record_with_flags(event, s, flags);
}
CUresult cuEventRecordWithFlags_ptsz(CUevent event, CUstream s, unsigned int flags)
{
	return record_with_flags(event, sim_own(s), flags);
}

static bool is_captured(CUevent event)
{
	return __atomic_load_n(&event->capture, __ATOMIC_ACQUIRE) != NULL;
}

static CUresult check_event(CUevent event)
{
	SIM_REQUIRE_READY();
	if (!event_usable(event))
		return CUDA_ERROR_INVALID_HANDLE;
	if (is_captured(event))
		return CUDA_ERROR_CAPTURED_EVENT;
	return sim_context_check(event->context);
}

CUresult cuEventQuery(CUevent event)
{
	SIM_TRY(check_event(event));
	SIM_TRY(sim_capture_unsafe_call());
	return sim_engine_event_done(event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent event)
{
	SIM_TRY(check_event(event));
	SIM_TRY(sim_capture_unsafe_call());
	sim_engine_wait_event(event);
	sim_pools_settle(event->context->device);
	return sim_context_check(event->context);
}

/* In simulated GPU time: what lies between the two moments at which the stream got to the events. */
CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end)
{
	SIM_REQUIRE(milliseconds);
	SIM_TRY(check_event(start));
	SIM_TRY(check_event(end));
	SIM_TRY(sim_capture_unsafe_call());
	if ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING || !sim_event_recorded(start) || !sim_event_recorded(end))
		return CUDA_ERROR_INVALID_HANDLE;
	if (!sim_engine_event_done(start) || !sim_engine_event_done(end))
		return CUDA_ERROR_NOT_READY;
	*milliseconds = (float)((double)(int64_t)(atomic_load(&end->times->time_ns) - atomic_load(&start->times->time_ns)) / 1e6);
	return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
	return cuEventElapsedTime_v2(milliseconds, start, end);
}

static CUresult wait_event(CUstream handle, CUevent event, unsigned flags)
{
	CUstream stream;
	SIM_REQUIRE(!(flags & ~1u));
	SIM_TRY(sim_stream_of(handle, &stream));
	if (!event_usable(event))
		return CUDA_ERROR_INVALID_HANDLE;
	if (event->share && sim_capturing(stream))
		return sim_capture_refuse(stream);
	if (sim_capturing(stream) || is_captured(event))
		return sim_capture_event_wait(stream, event);
	uint64_t ticket = sim_event_recorded(event);
	if (ticket == 0 || sim_event_finished(event) >= ticket)
		return CUDA_SUCCESS;
	atomic_fetch_add(&event->references, 1);
	return sim_engine_submit(stream, &(struct sim_work){ .kind = SIM_WORK_WAIT,
							     .foreign = event->share || atomic_load(&event->engine) != stream->engine,
							     .event = { event, ticket } });
}

CUresult cuStreamWaitEvent(CUstream s, CUevent event, unsigned int flags)
{
	return wait_event(s, event, flags);
}
CUresult cuStreamWaitEvent_ptsz(CUstream s, CUevent event, unsigned int flags)
{
	return wait_event(sim_own(s), event, flags);
}
