/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_ipc.c - events that several processes use: records, queries and waits of one on another's, dead processes, refusals. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "simulated_driver/tests/harness.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

#define SHARED_FLAGS (CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING)

/* Where two processes meet. */
struct meeting {
	_Atomic uint32_t step;
	_Atomic uint32_t done;
	CUipcEventHandle handle, back;
};

static CUevent export_event(CUipcEventHandle *handle)
{
	CUevent event;
	OK(cuEventCreate(&event, SHARED_FLAGS));
	OK(cuIpcGetEventHandle(handle, event));
	return event;
}

static CUevent open_event(CUipcEventHandle handle)
{
	CUevent event;
	OK(cuIpcOpenEventHandle(&event, handle));
	return event;
}

static unsigned entries_in_use(void)
{
	struct sim_state *state = test_state();
	unsigned used = 0;
	sim_reap(state);
	for (int i = 0; i < SIM_MAX_EVENTS; i++)
		used += state->events[i].id != 0;
	return used;
}

/* ---- what another process records ------------------------------------------------------------------------------------ */

static void record_when_told(void *argument)
{
	struct meeting *meeting = argument;
	test_context(0);
	CUfunction spin = test_spin();
	CUevent event = export_event(&meeting->handle);
	atomic_store(&meeting->step, 1);
	test_await(&meeting->step, 2);
	OK(test_launch(spin, 300000, NULL));
	OK(cuEventRecord(event, NULL));
	atomic_store(&meeting->step, 3);
	OK(cuStreamSynchronize(NULL));
	atomic_store(&meeting->done, 1);
	test_await(&meeting->step, 4);
}

static void query_and_synchronise_see_records_of_another_process(void)
{
	struct meeting *meeting = test_shared(sizeof *meeting);
	pid_t child = test_spawn(record_when_told, meeting);
	test_context(0);
	test_await(&meeting->step, 1);
	CUevent event = open_event(meeting->handle);
	OK(cuEventQuery(event));        /* never recorded */
	OK(cuEventSynchronize(event));
	atomic_store(&meeting->step, 2);
	test_await(&meeting->step, 3);
	CHECK_EQUAL(cuEventQuery(event), CUDA_ERROR_NOT_READY);
	CHECK_EQUAL(atomic_load(&meeting->done), 0);
	OK(cuEventSynchronize(event));
	OK(cuEventQuery(event));
	test_await(&meeting->done, 1);
	atomic_store(&meeting->step, 4);
	test_reap(child, 0);
	OK(cuEventDestroy_v2(event));
	CHECK_EQUAL(entries_in_use(), 0);
}

static void stream_waits_for_a_record_of_another_process(void)
{
	struct meeting *meeting = test_shared(sizeof *meeting);
	pid_t child = test_spawn(record_when_told, meeting);
	test_context(0);
	CUstream stream, other;
	OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	OK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
	CUfunction spin = test_spin();
	test_await(&meeting->step, 1);
	CUevent event = open_event(meeting->handle);
	atomic_store(&meeting->step, 2);
	test_await(&meeting->step, 3);
	OK(cuStreamWaitEvent(stream, event, 0));
	OK(test_launch(spin, 100, stream));
	OK(test_launch(spin, 100, other));
	OK(cuStreamSynchronize(other)); /* which does not wait for it */
	CHECK_EQUAL(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
	OK(cuStreamSynchronize(stream));
	OK(cuEventQuery(event));
	test_await(&meeting->done, 1);
	atomic_store(&meeting->step, 4);
	test_reap(child, 0);
}

/* ---- both sides record ----------------------------------------------------------------------------------------------- */

#define ROUNDS 50

static void answer_rounds(void *argument)
{
	struct meeting *meeting = argument;
	test_context(0);
	test_await(&meeting->step, 1);
	CUevent event = open_event(meeting->handle), back = export_event(&meeting->back);
	CUfunction spin = test_spin();
	atomic_store(&meeting->step, 2);
	for (uint32_t round = 0; round < ROUNDS; round++) {
		test_await(&meeting->step, 3 + 2 * round);
		OK(cuStreamWaitEvent(NULL, event, 0));
		OK(test_launch(spin, 200, NULL));
		OK(cuEventRecord(event, NULL));         /* the opener may record too */
		OK(cuEventRecord(back, NULL));
		atomic_store(&meeting->step, 4 + 2 * round);
	}
	OK(cuStreamSynchronize(NULL));
}

static void both_processes_record_and_wait_in_turns(void)
{
	struct meeting *meeting = test_shared(sizeof *meeting);
	pid_t child = test_spawn(answer_rounds, meeting);
	test_context(0);
	CUevent event = export_event(&meeting->handle);
	CUfunction spin = test_spin();
	atomic_store(&meeting->step, 1);
	test_await(&meeting->step, 2);
	CUevent back = open_event(meeting->back);
	for (uint32_t round = 0; round < ROUNDS; round++) {
		OK(test_launch(spin, 200, NULL));
		OK(cuEventRecord(event, NULL));
		atomic_store(&meeting->step, 3 + 2 * round);
		test_await(&meeting->step, 4 + 2 * round);
		OK(cuEventSynchronize(event));
		OK(cuEventSynchronize(back));
	}
	test_reap(child, 0);
	OK(cuEventDestroy_v2(back));
	CHECK_EQUAL(entries_in_use(), 1);
	OK(cuEventDestroy_v2(event));
	CHECK_EQUAL(entries_in_use(), 0);
}

/* ---- dead processes -------------------------------------------------------------------------------------------------- */

static void record_long_work(void *argument)
{
	struct meeting *meeting = argument;
	test_context(0);
	CUevent event = export_event(&meeting->handle);
	OK(test_launch(test_spin(), 60000000, NULL));
	OK(cuEventRecord(event, NULL));
	atomic_store(&meeting->step, 1);
	pause();
}

static void record_of_a_killed_process_counts_as_finished(void)
{
	struct meeting *meeting = test_shared(sizeof *meeting);
	pid_t child = test_spawn(record_long_work, meeting);
	test_context(0);
	CUstream stream;
	OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	test_await(&meeting->step, 1);
	CUevent event = open_event(meeting->handle), again = open_event(meeting->handle);
	OK(cuStreamWaitEvent(stream, event, 0));
	CHECK_EQUAL(cuEventQuery(again), CUDA_ERROR_NOT_READY);
	CHECK_EQUAL(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
	kill(child, SIGKILL);
	test_reap(child, SIGKILL);
	double start = test_seconds();
	OK(cuEventSynchronize(again));
	OK(cuStreamSynchronize(stream));
	CHECK(test_seconds() - start < 5);
	OK(cuEventQuery(event));
	CHECK_EQUAL(entries_in_use(), 1);
	OK(cuEventDestroy_v2(event));
	CHECK_EQUAL(entries_in_use(), 1);       /* the process has it twice */
	OK(cuEventRecord(again, stream));       /* and may go on with it */
	OK(cuEventSynchronize(again));
	OK(cuEventDestroy_v2(again));
	CHECK_EQUAL(entries_in_use(), 0);
}

static void open_and_stay(void *argument)
{
	struct meeting *meeting = argument;
	test_context(0);
	test_await(&meeting->step, 1);
	open_event(meeting->handle);
	open_event(meeting->handle);
	atomic_store(&meeting->step, 2);
	pause();
}

static void event_goes_with_its_last_user_also_after_kill(void)
{
	struct meeting *meeting = test_shared(sizeof *meeting);
	CUevent other;
	pid_t child = test_spawn(open_and_stay, meeting);
	test_context(0);
	CUevent event = export_event(&meeting->handle);
	atomic_store(&meeting->step, 1);
	test_await(&meeting->step, 2);
	OK(cuEventDestroy_v2(event));
	CHECK_EQUAL(entries_in_use(), 1);
	kill(child, SIGKILL);
	test_reap(child, SIGKILL);
	CHECK_EQUAL(entries_in_use(), 0);
	event = export_event(&meeting->back);
	CHECK_EQUAL(entries_in_use(), 1);
	OK(cuEventDestroy_v2(event));
	CHECK_EQUAL(cuEventQuery(event), CUDA_ERROR_INVALID_HANDLE);
	CHECK_EQUAL(cuIpcOpenEventHandle(&other, meeting->handle), CUDA_ERROR_INVALID_CONTEXT);
}

static void destroy_under_way(void *argument)
{
	struct meeting *meeting = argument;
	test_context(0);
	CUevent event = export_event(&meeting->handle);
	atomic_store(&meeting->done, 1);
	test_await(&meeting->step, 1);
	OK(test_launch(test_spin(), 100000, NULL));
	OK(cuEventRecord(event, NULL));
	OK(cuEventDestroy_v2(event));   /* its record is still to come */
	atomic_store(&meeting->step, 2);
	OK(cuStreamSynchronize(NULL));
	test_await(&meeting->step, 3);
}

static void destroyed_event_still_finishes_for_others(void)
{
	struct meeting *meeting = test_shared(sizeof *meeting);
	pid_t child = test_spawn(destroy_under_way, meeting);
	test_context(0);
	test_await(&meeting->done, 1);
	CUevent event = open_event(meeting->handle);
	atomic_store(&meeting->step, 1);
	test_await(&meeting->step, 2);
	CHECK_EQUAL(cuEventQuery(event), CUDA_ERROR_NOT_READY);
	OK(cuEventSynchronize(event));
	atomic_store(&meeting->step, 3);
	test_reap(child, 0);
}

/* ---- refusals -------------------------------------------------------------------------------------------------------- */

static void what_is_no_shared_event_is_refused(void)
{
	CUipcEventHandle handle;
	CUevent plain, shared, other;
	float ms;
	int supported;
	test_context(0);
	OK(cuDeviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 0));
	CHECK_EQUAL(supported, 1);
	CHECK_EQUAL(cuEventCreate(&shared, CU_EVENT_INTERPROCESS), CUDA_ERROR_INVALID_VALUE);
	OK(cuEventCreate(&plain, CU_EVENT_DISABLE_TIMING));
	CHECK_EQUAL(cuIpcGetEventHandle(&handle, plain), CUDA_ERROR_INVALID_HANDLE);
	shared = export_event(&handle);
	CHECK_EQUAL(cuIpcOpenEventHandle(&other, handle), CUDA_ERROR_INVALID_CONTEXT);  /* made here */
	OK(cuEventRecord(shared, NULL));
	CHECK_EQUAL(cuEventElapsedTime(&ms, shared, shared), CUDA_ERROR_INVALID_HANDLE);
	for (size_t i = 0; i < 16; i += 4) {
		CUipcEventHandle broken = handle;
		broken.reserved[i] ^= 0x55;
		CHECK(cuIpcOpenEventHandle(&other, broken) != CUDA_SUCCESS);
	}
	OK(cuEventDestroy_v2(shared));
	CHECK_EQUAL(cuIpcGetEventHandle(&handle, shared), CUDA_ERROR_INVALID_HANDLE);
}

static void captures_take_no_shared_events(void)
{
	CUipcEventHandle handle;
	CUgraph graph;
	CUstream stream;
	test_context(0);
	CUevent shared = export_event(&handle);
	OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	for (int i = 0; i < 3; i++) {
		OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
		CUresult result = i == 0   ? cuEventRecord(shared, stream)
				  : i == 1 ? cuStreamWaitEvent(stream, shared, 0)
					   : cuIpcGetEventHandle(&handle, shared);
		CHECK_EQUAL(result, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
		CHECK_EQUAL(cuStreamEndCapture(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
	}
}

static void many_events_are_shared_and_all_go(void)
{
	static CUevent events[2000];
	CUipcEventHandle handle;
	test_context(0);
	for (int round = 0; round < 2; round++) {
		for (size_t i = 0; i < COUNT(events); i++)
			events[i] = export_event(&handle);
		CHECK_EQUAL(entries_in_use(), COUNT(events));
		for (size_t i = 0; i < COUNT(events); i++)
			OK(cuEventDestroy_v2(events[i]));
		CHECK_EQUAL(entries_in_use(), 0);
	}
}

static const struct test_case cases[] = {
	CASE(query_and_synchronise_see_records_of_another_process, "t4x2"),
	CASE(stream_waits_for_a_record_of_another_process, "t4x2"),
	CASE(both_processes_record_and_wait_in_turns, "t4x2"),
	CASE(record_of_a_killed_process_counts_as_finished, "t4x2"),
	CASE(event_goes_with_its_last_user_also_after_kill, "t4x2"),
	CASE(destroyed_event_still_finishes_for_others, "t4x2"),
	CASE(what_is_no_shared_event_is_refused, "t4x2"),
	CASE(captures_take_no_shared_events, "t4x2"),
	CASE(many_events_are_shared_and_all_go, "t4x2"),
};

int main(int argc, char **argv)
{
	return test_main(argc, argv, cases, COUNT(cases));
}
