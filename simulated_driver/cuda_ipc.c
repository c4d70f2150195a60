/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_ipc.c - device memory and events of one process opened in another (cuIpc*).
 *
 * A handle names a file in the node's directory. Taking a handle puts that file behind the allocation (behind the whole 2 MiB segment, for
 * a small one), keeping its bytes; opening it maps the file. The memory stays charged to the node until the last process releases it; the
 * file goes with it (state.h, exported allocations).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "simulated_driver/cuda_internal.h"

#define HANDLE_MAGIC 0x4350493051494c41u

struct ipc_handle {
	uint64_t magic;
	uint64_t device, inode;             /* of the file */
	uint64_t offset, file_bytes;        /* where in it the allocation begins */
	uint32_t exporter_slot, exporter_generation;
};
_Static_assert(sizeof(struct ipc_handle) <= CU_IPC_HANDLE_SIZE, "an IPC handle has 64 bytes");

struct import {
	struct sim_backing file;
	struct sim_large *large;
	uint32_t opens;
	struct import *next;
};

static pthread_mutex_t ipc_lock = PTHREAD_MUTEX_INITIALIZER;    /* taken before a memory lock */
static struct import *imports;

/* ---- taking a handle ------------------------------------------------------------------------------------------------- */

/* The content of one file: an allocation with its own pages, or the segment around a small one. */
struct exported {
	struct sim_window *window;
	uint64_t base, bytes;
	bool touched;
	struct sim_backing *shared;
};

static CUresult exported_of(const struct sim_range *range, struct exported *out)
{
	if (range->segment && !range->pool) {
		struct sim_segment *segment = range->segment;
		*out = (struct exported){ segment->window, segment->base, segment->bytes, segment->touched, &segment->shared };
		return CUDA_SUCCESS;
	}
	if (range->large && range->large->use == SIM_LARGE_PLAIN) {
		struct sim_large *large = range->large;
		*out = (struct exported){ large->window, large->base, large->granules * SIM_GRANULE_BYTES, large->touched, &large->shared };
		return CUDA_SUCCESS;
	}
	return CUDA_ERROR_INVALID_VALUE;    /* memory of pools, managed, imported and VMM memory has no such handle */
}

static bool write_all(int fd, const uint8_t *bytes, uint64_t length)
{
	for (uint64_t done = 0; done < length;) {
		ssize_t wrote = pwrite(fd, bytes + done, length - done, (off_t)done);
		if (wrote <= 0)
			return false;
		done += (uint64_t)wrote;
	}
	return true;
}

/* A file in the node's directory, first under a private name, then under the one its inode gives it. */
static int make_file(const struct exported *exported, struct sim_shared_file *file)
{
	char temporary[PATH_MAX], path[PATH_MAX];
	struct stat status;
	if (snprintf(temporary, sizeof temporary, "%s/.shared.%ld.%llu", sim_state_dir(), (long)getpid(),
		     (unsigned long long)sim_next_id()) >= (int)sizeof temporary)
		return -1;
	int fd = open(temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
	if (fd < 0)
		return -1;
	bool ready = fchmod(fd, 0666) == 0 && ftruncate(fd, (off_t)exported->bytes) == 0 && fstat(fd, &status) == 0 &&
		     (!exported->touched || write_all(fd, sim_shadow(exported->window, exported->base), exported->bytes)) &&
		     sim_shared_path(status.st_ino, path, sizeof path) && rename(temporary, path) == 0;
	if (!ready) {
		unlink(temporary);
		close(fd);
		return -1;
	}
	*file = (struct sim_shared_file){ .device = status.st_dev, .inode = status.st_ino, .bytes = exported->bytes, .has_name = true };
	return fd;
}

/* The memory lock is held. */
static CUresult share(struct sim_device *device, const struct exported *exported)
{
	struct sim_shared_file file;
	char path[PATH_MAX];
	int fd = make_file(exported, &file);
	if (fd < 0)
		return CUDA_ERROR_OPERATING_SYSTEM;
	bool mapped = sim_memory_back(exported->window, exported->base, exported->bytes, fd, 0);
	close(fd);
	if (mapped && sim_shared_enter(sim_cuda.state, atomic_load(&sim_cuda.slot), &device->domain, &file)) {
		*exported->shared = (struct sim_backing){ file.device, file.inode };
		return CUDA_SUCCESS;
	}
	if (sim_shared_path(file.inode, path, sizeof path))
		unlink(path);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr address)
{
	CUcontext context;
	struct sim_range range;
	struct exported exported;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(out && sim_memory_find(address, &range));
	SIM_TRY(exported_of(&range, &exported));
	sim_engine_wait_copies(&range.device->engine);
	pthread_mutex_lock(&range.device->memory.lock);
	CUresult result = exported.shared->inode ? CUDA_SUCCESS : share(range.device, &exported);
	struct ipc_handle handle = { .magic = HANDLE_MAGIC,
				     .device = exported.shared->device,
				     .inode = exported.shared->inode,
				     .offset = range.base - exported.base,
				     .file_bytes = exported.bytes };
	pthread_mutex_unlock(&range.device->memory.lock);
	if (result != CUDA_SUCCESS)
		return result;
	handle.exporter_slot = (uint32_t)atomic_load(&sim_cuda.slot);
	handle.exporter_generation = atomic_load(&sim_cuda.state->slots[handle.exporter_slot].generation);
	memset(out, 0, sizeof *out);
	memcpy(out, &handle, sizeof handle);
	return CUDA_SUCCESS;
}

/* ---- opening one ----------------------------------------------------------------------------------------------------- */

static bool made_here(uint32_t exporter_slot, uint32_t exporter_generation)
{
	int slot = atomic_load(&sim_cuda.slot);
	return slot >= 0 && exporter_slot == (uint32_t)slot && exporter_generation == atomic_load(&sim_cuda.state->slots[slot].generation);
}

static struct import *find_import(const struct ipc_handle *handle)
{
	for (struct import *import = imports; import; import = import->next)
		if (import->file.inode == handle->inode && import->file.device == handle->device)
			return import;
	return NULL;
}

static int open_file(const struct ipc_handle *handle)
{
	char path[PATH_MAX];
	struct stat status;
	int fd = sim_shared_path(handle->inode, path, sizeof path) ? open(path, O_RDWR | O_CLOEXEC) : -1;
	if (fd >= 0 && (fstat(fd, &status) != 0 || status.st_ino != handle->inode || (uint64_t)status.st_size != handle->file_bytes)) {
		close(fd);
		fd = -1;
	}
	return fd;
}

/* Map the file at fresh addresses of the device it belongs to. ipc_lock is held, and the process is a holder already. */
static CUresult map_file(int fd, const struct ipc_handle *handle, const struct sim_domain *domain, struct import **out)
{
	struct sim_device *device = sim_device_of_domain(domain);
	if (!device)
		return CUDA_ERROR_INVALID_DEVICE;
	struct import *import = calloc(1, sizeof *import);
	struct sim_large *large = import ? sim_large_new(device, SIM_LARGE_IMPORTED, NULL, handle->file_bytes) : NULL;
	if (!large) {
		free(import);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	pthread_mutex_lock(&device->memory.lock);
	bool mapped = sim_memory_back(large->window, large->base, handle->file_bytes, fd, 0);
	if (mapped)
		large->shared = (struct sim_backing){ handle->device, handle->inode };
	pthread_mutex_unlock(&device->memory.lock);
	if (!mapped) {
		sim_large_delete(large);
		free(import);
		return CUDA_ERROR_MAP_FAILED;
	}
	*import = (struct import){ .file = large->shared, .large = large, .next = imports };
	imports = import;
	*out = import;
	return CUDA_SUCCESS;
}

static CUresult import_new(const struct ipc_handle *handle, struct import **out)
{
	struct sim_domain domain;
	uint64_t bytes;
	int fd = open_file(handle);
	if (fd < 0)
		return CUDA_ERROR_INVALID_HANDLE;   /* the exporter has freed it, or is another node */
	CUresult result = CUDA_ERROR_INVALID_HANDLE;
	if (sim_claim_slot() &&
	    sim_shared_join(sim_cuda.state, atomic_load(&sim_cuda.slot), handle->device, handle->inode, &domain, &bytes)) {
		result = map_file(fd, handle, &domain, out);
		if (result != CUDA_SUCCESS)
			sim_shared_leave(sim_cuda.state, atomic_load(&sim_cuda.slot), handle->device, handle->inode);
	}
	close(fd);
	return result;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle given, unsigned int flags)
{
	CUcontext context;
	struct ipc_handle handle;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(out && flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
	memcpy(&handle, &given, sizeof handle);
	if (handle.magic != HANDLE_MAGIC)
		return CUDA_ERROR_INVALID_HANDLE;
	if (made_here(handle.exporter_slot, handle.exporter_generation))
		return CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_lock(&ipc_lock);
	struct import *import = find_import(&handle);
	CUresult result = import ? CUDA_SUCCESS : import_new(&handle, &import);
	if (result == CUDA_SUCCESS) {
		import->opens++;
		*out = import->large->base + handle.offset;
	}
	pthread_mutex_unlock(&ipc_lock);
	return result;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags)
{
	return cuIpcOpenMemHandle_v2(out, handle, flags);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
	CUcontext context;
	CUresult result = CUDA_ERROR_INVALID_VALUE;
	SIM_TRY(sim_current(&context));
	sim_engine_wait_copies(&context->device->engine);
	pthread_mutex_lock(&ipc_lock);
	for (struct import **at = &imports; *at; at = &(*at)->next) {
		struct import *import = *at;
		if (address - import->large->base >= import->large->bytes)
			continue;
		if (--import->opens == 0) {
			*at = import->next;
			sim_large_delete(import->large);
			free(import);
		}
		result = CUDA_SUCCESS;
		break;
	}
	pthread_mutex_unlock(&ipc_lock);
	return result;
}

/* ---- events between processes ---------------------------------------------------------------------------------------- */

/* The records of such an event are an entry of the node's state, which goes with its last holder (state.h). A process that opens an entry
 * several times is one holder. Any holder may record; a record of a process that died counts as finished (engine.c). */
struct sim_event_share {
	struct sim_shared_event *entry;
	bool made_here;
	uint32_t references; /* events of this process */
	struct sim_event_share *next;
};

struct event_handle {
	uint64_t magic, id;
	uint32_t index;
	uint32_t exporter_slot, exporter_generation;
};
_Static_assert(sizeof(struct event_handle) <= CU_IPC_HANDLE_SIZE, "an IPC handle has 64 bytes");
#define EVENT_MAGIC 0x4350494556455141u

static pthread_mutex_t share_lock = PTHREAD_MUTEX_INITIALIZER; /* also taken with an engine's lock held; the node's mutex comes after */
static struct sim_event_share *shares;

static int own_slot(void)
{
	return atomic_load(&sim_cuda.slot);
}

/* share_lock is held. On failure the entry is left. */
static bool share_with(CUevent event, struct sim_shared_event *entry, bool made_here)
{
	struct sim_event_share *share = shares;
	while (share && share->entry != entry)
		share = share->next;
	if (!share) {
		share = malloc(sizeof *share);
		if (!share) {
			sim_event_entry_leave(sim_cuda.state, own_slot(), entry);
			return false;
		}
		*share = (struct sim_event_share){ .entry = entry, .made_here = made_here, .next = shares };
		shares = share;
	}
	share->references++;
	event->share = share;
	event->times = &entry->times;
	return true;
}

bool sim_event_share_new(CUevent event)
{
	if (!sim_claim_slot())
		return false;
	pthread_mutex_lock(&share_lock);
	struct sim_shared_event *entry = sim_event_entry_new(sim_cuda.state, own_slot());
	bool shared = entry && share_with(event, entry, true);
	pthread_mutex_unlock(&share_lock);
	return shared;
}

void sim_event_share_release(CUevent event)
{
	struct sim_event_share *share = event->share;
	pthread_mutex_lock(&share_lock);
	if (--share->references == 0) {
		struct sim_event_share **at = &shares;
		while (*at != share)
			at = &(*at)->next;
		*at = share->next;
		sim_event_entry_leave(sim_cuda.state, own_slot(), share->entry);
		free(share);
	}
	pthread_mutex_unlock(&share_lock);
	event->share = NULL;
}

CUresult cuIpcGetEventHandle(CUipcEventHandle *out, CUevent event)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(out);
	if (!sim_is(event, SIM_KIND_EVENT) || atomic_load(&event->destroyed) || !event->share || !event->share->made_here)
		return CUDA_ERROR_INVALID_HANDLE;
	SIM_TRY(sim_capture_unsafe_call());
	const struct sim_shared_event *entry = event->share->entry;
	struct event_handle handle = { .magic = EVENT_MAGIC,
				       .id = entry->id,
				       .index = (uint32_t)(entry - sim_cuda.state->events),
				       .exporter_slot = (uint32_t)own_slot(),
				       .exporter_generation = atomic_load(&sim_cuda.state->slots[own_slot()].generation) };
	memset(out, 0, sizeof *out);
	memcpy(out, &handle, sizeof handle);
	return CUDA_SUCCESS;
}

static CUresult join_event(CUevent event, const struct event_handle *handle)
{
	if (!sim_claim_slot())
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_lock(&share_lock);
	struct sim_shared_event *entry = sim_event_entry_join(sim_cuda.state, own_slot(), handle->index, handle->id);
	CUresult result = !entry ? CUDA_ERROR_INVALID_HANDLE : share_with(event, entry, false) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_unlock(&share_lock);
	return result;
}

CUresult cuIpcOpenEventHandle(CUevent *out, CUipcEventHandle given)
{
	CUcontext context;
	struct event_handle handle;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(out);
	SIM_TRY(sim_capture_unsafe_call());
	memcpy(&handle, &given, sizeof handle);
	if (handle.magic != EVENT_MAGIC)
		return CUDA_ERROR_INVALID_HANDLE;
	if (made_here(handle.exporter_slot, handle.exporter_generation))
		return CUDA_ERROR_INVALID_CONTEXT;
	CUevent event = sim_event_new(context, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS);
	CUresult result = event ? join_event(event, &handle) : CUDA_ERROR_OUT_OF_MEMORY;
	if (result == CUDA_SUCCESS)
		*out = event;
	else if (event)
		sim_event_release(event);
	return result;
}
