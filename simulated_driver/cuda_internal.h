/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the parts of the simulated libcuda share: devices, contexts, streams, the objects behind handles, and the two machines below them.
 *
 *   memory.c   the device address space of this process and what backs it           (lock: sim_memory.lock, one per device)
 *   engine.c   the work queues of this process on one device, and simulated time    (lock: sim_engine.lock, one per device)
 *   cuda_*.c   the entry points, one subject per file
 *
 * Lock order: sim_context_lock, then an engine's lock, then a memory lock; the node's mutex (sim_lock) comes last. No two engine locks at
 * once. Handles are pointers to objects that are never given back to malloc: a stale handle is recognised by its magic word instead of
 * being a use after free. What is shared with other processes is in state.h.
 */
#ifndef ALIQUOT_SIM_CUDA_INTERNAL_H
#define ALIQUOT_SIM_CUDA_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda_abi.h"
#include "simulated_driver/image.h"
#include "simulated_driver/state.h"

#define SIM_GRANULE_BYTES (UINT64_C(2) << 20)    /* physical memory is handed out in pages of 2 MiB, as on the real card */
#define SIM_UNIT_BYTES 512u                      /* alignment of every allocation */
#define SIM_VA_CLASSES 256u                      /* sizes of address ranges, eight for each doubling */
#define SIM_QUEUE_DEPTH 1024u                    /* launches a stream holds before the next one blocks */

#define sim_likely(x) __builtin_expect(!!(x), 1)
#define sim_unlikely(x) __builtin_expect(!!(x), 0)

/* ---- objects behind handles ------------------------------------------------------------------------------------------ */

enum sim_kind {
	SIM_KIND_CONTEXT = 1,
	SIM_KIND_STREAM,
	SIM_KIND_EVENT,
	SIM_KIND_MODULE,
	SIM_KIND_FUNCTION,
	SIM_KIND_ARRAY,
	SIM_KIND_MIPMAP,
	SIM_KIND_POOL,
	SIM_KIND_PHYSICAL,
	SIM_KIND_GRAPH,
	SIM_KIND_NODE,
	SIM_KIND_EXEC,
	SIM_KIND_USER_OBJECT,
	SIM_KIND_LINK,
	SIM_KIND_COUNT
};

struct sim_object {
	uint32_t magic;                             /* SIM_MAGIC | kind while alive, 0 when deleted */
	struct sim_object *next_free, *next_made; /* of its kind; of all, so that a leak checker finds what the application still holds */
};

void *sim_object_new(enum sim_kind kind, size_t size); /* zeroed except for the header; NULL without memory */
void sim_object_delete(void *object);
#define SIM_MAGIC 0x53696d00u
static inline bool sim_is(const void *object, enum sim_kind kind)
{
	return object && ((uintptr_t)object & 7) == 0 &&
	       __atomic_load_n(&((const struct sim_object *)object)->magic, __ATOMIC_ACQUIRE) == (SIM_MAGIC | (uint32_t)kind);
}

/* ---- memory ---------------------------------------------------------------------------------------------------------- */

struct sim_device;
struct sim_segment;

/* A run of pages of a window's addresses; goes back to the window's list of its size class when its owner is done. */
struct sim_va_range {
	uint64_t base, granules;
	struct sim_va_range *next;
};

/* A chunk of a segment, described at its first unit; the units behind it are not looked at. */
struct sim_unit {
	uint32_t length, previous; /* in units: of this chunk, and of the one before (0: this is the first) */
	uint64_t bytes; /* as requested; 0: free; SIM_VACANT: no memory behind it (pools) */
	struct sim_segment *segment;
	union {
		struct {
			struct sim_unit *next, *prev;
		} free;
		struct {
			CUcontext owner;
			uint64_t id;
		} used;
	};
};

#define SIM_VACANT UINT64_MAX
static inline bool sim_unit_in_use(const struct sim_unit *unit)
{
	return unit->bytes && unit->bytes != SIM_VACANT;
}

#define SIM_HEAP_ROWS 32
#define SIM_HEAP_COLUMNS 8
/* Two-level segregated fit: constant time for any number of chunks. */
struct sim_heap {
	uint32_t rows;
	uint8_t columns[SIM_HEAP_ROWS];
	struct sim_unit *lists[SIM_HEAP_ROWS][SIM_HEAP_COLUMNS];
};

enum sim_range_kind { SIM_RANGE_SEGMENT = 1, SIM_RANGE_LARGE = 2, SIM_RANGE_RESERVATION = 3 };

/* A file that other processes map too. inode 0: no file. */
struct sim_backing {
	uint64_t device, inode;
};

/* Addresses that are cut into chunks: 2 MiB for small cuMemAllocs, arenas of pools (arena.c). */
struct sim_segment {
	enum sim_range_kind kind;
	struct sim_device *device;
	struct sim_window *window;
	struct sim_va_range *range;
	uint64_t base, bytes;
	uint32_t n_units;
	bool touched; /* host pages behind it may be in use */
	bool charged;
	struct sim_backing shared;
	struct sim_heap *heap;
	CUmemoryPool pool; /* NULL: the device's small allocations */
	struct sim_segment *next, *prev; /* in the idle list, or among the pool's arenas */
	struct sim_unit units[];
};

enum sim_large_kind { SIM_LARGE_PLAIN, SIM_LARGE_MANAGED, SIM_LARGE_GRAPH, SIM_LARGE_IMPORTED };

/* An allocation with its own pages. */
struct sim_large {
	enum sim_range_kind kind;
	enum sim_large_kind use;
	struct sim_device *device; /* managed: the device of the context that made it */
	struct sim_window *window;
	struct sim_va_range *range;
	uint64_t base, bytes, granules;
	CUcontext owner;
	uint64_t id;
	uint64_t charged_bytes; /* managed: 0, its pages are charged where they lie */
	uint8_t *pages; /* managed, once it moved: where each lies; 0 = the host, else device number + 1 */
	bool touched;
	struct sim_backing shared;
	struct sim_graph_allocation *graph_allocation;
	struct sim_large *next_spare;
	/* managed: advice; locations are ordinals, CU_DEVICE_CPU or CU_DEVICE_INVALID */
	int read_mostly, preferred, accessed_by, prefetched;
};

/* Physical memory made by cuMemCreate. */
struct sim_physical {
	struct sim_object object;
	struct sim_device *device;
	struct sim_domain domain;
	CUmemAllocationProp properties;
	uint64_t bytes;
	uint32_t handles, maps;
	bool imported;
	int fd; /* -1: an extent of the device's own file */
	uint64_t offset;
	struct sim_backing shared;
	struct sim_map_record *records; /* where it is mapped */
	struct sim_physical *next_shared;
};

struct sim_mapping {
	struct sim_physical *physical; /* NULL: nothing mapped on this page */
	uint64_t offset; /* in the physical allocation */
	uint64_t first, pages; /* the cuMemMap call this page belongs to */
	CUmemAccess_flags access[SIM_MAX_GPUS];
};

struct sim_reservation {
	enum sim_range_kind kind;
	struct sim_device *device;
	struct sim_window *window;
	struct sim_va_range *range; /* larger than requested when alignment needs it */
	uint64_t base, bytes; /* as given to the caller */
	struct sim_mapping *mappings; /* one per page of [base, base + bytes) */
};

/* A range of addresses of this process. Device addresses are not mapped readable: a CPU access faults as on the real machine. The
 * bytes are at `shadow` further on, in memory that costs nothing until it is touched. Managed memory has shadow 0. */
struct sim_window {
	pthread_mutex_t *lock; /* of all that lies in it */
	uint64_t base, bytes;
	int64_t shadow;
	uint64_t next_granule;
	uintptr_t *granules; /* what lies on each page: NULL or struct sim_segment / sim_large / sim_reservation */
	struct sim_va_range *free_ranges[SIM_VA_CLASSES]; /* by size class */
	struct sim_large *spare_large; /* descriptions not in use */
};

struct sim_memory {
	pthread_mutex_t lock;
	struct sim_window window;
	struct sim_heap small;
	struct sim_segment *idle; /* 2 MiB segments without a chunk in use; not charged */
	int file; /* sparse file behind cuMemCreate; -1 until first needed */
	uint64_t file_bytes; /* addresses in it are never reused: holes cost nothing */
};

/* What is known about an address. */
struct sim_range {
	enum sim_range_kind kind;
	struct sim_device *device;
	uint64_t base, bytes; /* of the allocation, or of the mapping for VMM */
	uint64_t reserved_base, reserved_bytes; /* VMM: of the address reservation */
	CUcontext owner;
	CUmemoryPool pool;
	uint64_t id;
	bool managed, imported, mapped, exportable;
	CUmemAccess_flags access;
	struct sim_large *large;
	struct sim_segment *segment;
	struct sim_physical *physical;
};

bool sim_memory_init(struct sim_device *devices, int n_devices);

/* cuMemAlloc and relatives. `owner` NULL: belongs to the driver itself. Take and release the device's memory lock. */
CUresult sim_memory_allocate(struct sim_device *device, CUcontext owner, uint64_t bytes, CUdeviceptr *out);
CUresult sim_memory_allocate_low(struct sim_device *device, CUcontext owner, uint64_t bytes, CUdeviceptr *out); /* below 4 GiB */
CUresult sim_memory_allocate_managed(struct sim_device *device, CUcontext owner, uint64_t bytes, CUdeviceptr *out);
CUresult sim_memory_free(CUdeviceptr address);
void sim_memory_free_owned(struct sim_device *device, CUcontext owner);
/* Managed pages move to the device as far as there is room, or to the host (NULL); what does not fit stays where it is. */
void sim_memory_move(struct sim_large *managed, uint64_t address, uint64_t bytes, struct sim_device *device);
void sim_managed_touch(CUdeviceptr address, size_t bytes, struct sim_device *device);

/* Managed memory that one launch uses: whole allocations, as addresses in them. */
#define SIM_MAX_TOUCHED 8u
struct sim_touched {
	uint32_t count;
	CUdeviceptr addresses[SIM_MAX_TOUCHED];
};
void sim_touch(const struct sim_touched *touched, struct sim_device *device);
/* Has the process ever made managed memory? */
extern _Atomic bool sim_managed_made;

/* Reserve or release physical memory of the device for this process; the device's memory lock is held. */
bool sim_memory_charge(struct sim_device *device, uint64_t bytes);
void sim_memory_uncharge(struct sim_device *device, uint64_t bytes);

/* Address ranges without physical memory (graph allocations, imports); charged_bytes stays 0. They take the memory lock. */
struct sim_large *sim_large_new(struct sim_device *device, enum sim_large_kind use, CUcontext owner, uint64_t bytes);
void sim_large_delete(struct sim_large *large);

/* Segments and their chunks; the memory lock is held. */
struct sim_segment *sim_segment_new(struct sim_device *device, struct sim_heap *heap, CUmemoryPool pool, uint64_t bytes);
void sim_segment_delete(struct sim_segment *segment);       /* one chunk, in no list */
void sim_segment_drop(struct sim_segment *segment, uint32_t first, uint32_t units); /* the bytes of these units are lost */
struct sim_unit *sim_heap_take(struct sim_heap *heap, uint32_t units);
struct sim_unit *sim_heap_take_from(struct sim_heap *heap, struct sim_unit *unit, uint32_t units); /* from this free chunk */
struct sim_unit *sim_heap_find_any(struct sim_heap *heap, uint32_t units); /* also what a search in constant time misses */
struct sim_unit *sim_heap_give(struct sim_heap *heap, struct sim_unit *unit); /* the merged chunk, which lies in the heap */
void sim_heap_insert(struct sim_heap *heap, struct sim_unit *unit);
void sim_heap_remove(struct sim_heap *heap, struct sim_unit *unit);
struct sim_unit *sim_unit_split(struct sim_unit *unit, uint32_t units); /* the rest behind so many units; neither lies in a list */
void sim_unit_join(struct sim_unit *unit, struct sim_unit *next);
uint64_t sim_unit_address(const struct sim_unit *unit);

/* The memory of a pool; the memory lock is held. */
struct sim_unit *sim_arena_grow(CUmemoryPool pool, uint32_t units); /* a free chunk of at least so many units, or NULL */
bool sim_arena_release(CUmemoryPool pool, uint64_t keep, bool in_pieces); /* until at most `keep` bytes remain; true when something went */
void sim_arenas_delete(CUmemoryPool pool); /* those without memory */
void sim_arena_mark(struct sim_unit *unit, bool in_use);
const struct sim_unit *sim_arena_chunk_around(const struct sim_segment *arena, uint32_t index); /* in use, or NULL */

bool sim_memory_find(CUdeviceptr address, struct sim_range *out);
/* The unit of a chunk that starts at `address` in a segment of `pool`; the memory lock is held. NULL when there is no such unit. */
struct sim_unit *sim_memory_unit_at(struct sim_device *device, CUdeviceptr address);
struct sim_device *sim_memory_device_of(CUdeviceptr address);
/* Whether an address lies in any device or managed window. */
bool sim_memory_is_ours(CUdeviceptr address);

/* Where the bytes of a device range lie, or NULL when it is not inside one allocation that `accessor` may use. */
void *sim_memory_bytes(CUdeviceptr address, uint64_t bytes, const struct sim_device *accessor);

/* Let the bytes of a range be those of a file, or private and zero again. The window's lock is held. */
bool sim_memory_back(const struct sim_window *window, uint64_t address, uint64_t bytes, int fd, uint64_t offset);
void sim_memory_unback(const struct sim_window *window, uint64_t address, uint64_t bytes);
/* The bytes at a device address, without any check. */
static inline void *sim_shadow(const struct sim_window *window, uint64_t address)
{
	return (void *)(uintptr_t)(address + (uint64_t)window->shadow);
}

/* Address reservations; `new` takes the memory lock, for the others it must be held. `at` returns NULL without one. */
struct sim_reservation *sim_reservation_new(struct sim_device *device, uint64_t bytes, uint64_t alignment);
struct sim_reservation *sim_reservation_at(const struct sim_window *window, CUdeviceptr address);
void sim_reservation_delete(struct sim_reservation *reservation);
struct sim_window *sim_memory_window_of(CUdeviceptr address);

uint64_t sim_next_id(void);

/* ---- work ------------------------------------------------------------------------------------------------------------ */

enum sim_work_kind {
	SIM_WORK_MARK,
	SIM_WORK_KERNEL,
	SIM_WORK_COPY,
	SIM_WORK_COPY_3D,
	SIM_WORK_FILL,
	SIM_WORK_HOST,
	SIM_WORK_CALLBACK,
	SIM_WORK_EVENT,
	SIM_WORK_WAIT,
	SIM_WORK_VALUE,
	SIM_WORK_GRAPH
};

/* One plane of a fill: `element_bytes` of `value` repeated over height rows. */
struct sim_fill {
	uint8_t *bytes;
	uint64_t pitch, width, height; /* width in elements */
	uint32_t value, element_bytes;
};

/* A copy of `depth` planes of `height` rows of `width` bytes between two places with their bytes in host memory. */
struct sim_copy_3d {
	const uint8_t *from;
	uint8_t *to;
	uint64_t from_pitch, from_plane, to_pitch, to_plane;
	uint64_t width, height, depth;
};

/* A stream memory operation: write a word, or wait until it fits. */
enum sim_value_operation { SIM_VALUE_WRITE, SIM_VALUE_WAIT_GEQ, SIM_VALUE_WAIT_EQ, SIM_VALUE_WAIT_AND, SIM_VALUE_WAIT_NOR };
struct sim_value {
	void *word; /* aligned to its size: 4 or 8 bytes */
	uint64_t value;
	uint8_t operation, bytes;
};

struct sim_work {
	uint8_t kind;
	bool foreign; /* waits for what another device or the host may do: an event of another device, a word of memory */
	uint64_t sequence; /* order of submission on the engine */
	uint64_t submitted_ns;
	uint64_t duration_ns; /* alone on the SMs; for copies, on the bus */
	union {
		struct {
			const void *from;
			void *to;
			uint64_t bytes;
		} copy;
		struct sim_copy_3d *copy_3d; /* owned, freed when done; inside a graph owned by the program */
		struct sim_fill fill;
		struct {
			CUhostFn run;
			void *data;
		} host;
		struct {
			CUstreamCallback run;
			void *data;
		} callback;
		struct {
			CUevent event;
			uint64_t ticket;
		} event; /* ticket 0, in graphs: the newest record */
		struct sim_value value;
		struct sim_program *program; /* one reference */
	};
};

/* What a graph launch plays: immutable once published. */
struct sim_program {
	_Atomic uint32_t references;
	uint32_t n_items;
	uint32_t n_kernels;
	bool foreign; /* one of the items is */
	struct sim_user_hold *user_holds;
	uint64_t kernels_ns; /* SM time of all of them */
	/* managed memory that kernels and fills use */
	uint32_t n_touches;
	struct sim_program_touch {
		CUdeviceptr address;
		uint64_t bytes; /* 0: the whole allocation */
		struct sim_device *device;
	} *touches;
	struct sim_work items[];
};
void sim_program_release(struct sim_program *program);
void sim_program_touch(const struct sim_program *program);

struct CUevent_st {
	struct sim_object object;
	CUcontext context;
	unsigned flags;
	_Atomic uint32_t references; /* the handle and every queued item */
	_Atomic bool destroyed;
	struct sim_event_times *times; /* `own`, or those of an entry in the node's state */
	struct sim_event_times own;
	struct sim_event_share *share; /* several processes may use it; see cuda_ipc.c */
	struct sim_engine *_Atomic engine; /* of this process's newest record */
	struct sim_capture *capture; /* recorded inside a capture, at this node set */
	CUgraphNode *captured_after;
	size_t n_captured_after;
};
void sim_event_release(CUevent event);
/* For an event that several processes may use: its entry in the node's state. False without one. */
bool sim_event_share_new(CUevent event);
void sim_event_share_release(CUevent event);
static inline uint64_t sim_event_recorded(CUevent event)
{
	return atomic_load(&event->times->recorded);
}
static inline uint64_t sim_event_finished(CUevent event)
{
	return atomic_load(&event->times->finished);
}

struct CUstream_st {
	struct sim_object object;
	CUcontext context;
	struct sim_engine *engine;
	uint64_t id;
	unsigned flags;
	int priority;
	CUlaunchAttributeValue access_policy, sync_policy;
	bool is_legacy, is_per_thread;
	int owner_thread; /* per-thread default stream: kernel thread id */

	/* below: under the engine's lock */
	bool doomed; /* destroyed, but still has work */
	bool host_running; /* its head is a host function that runs right now */
	struct sim_work *ring;
	uint32_t head, count, capacity;
	uint64_t last_sequence, retired_sequence;
	uint64_t ready_ns; /* simulated time at which its last retired item ended */
	bool begun; /* the head kernel has run for a while: remaining_ns is what is left */
	uint64_t remaining_ns;
	uint32_t cursor; /* inside the program of a graph launch at the head */
	struct CUstream_st *next_active, *prev_active;
	struct CUstream_st *next_of_context; /* under the context lock */

	struct sim_capture *capture; /* under the capture lock of cuda_capture.c; the pointer is read without it */
	CUgraphNode *tail; /* what the next captured node depends on */
	size_t n_tail, tail_capacity;
};

struct sim_engine {
	pthread_mutex_t lock;
	pthread_cond_t progress; /* an item was retired, for waiting threads */
	pthread_cond_t work; /* for the engine's thread */
	struct sim_device *device;
	bool has_thread, thread_idle;
	uint32_t waiters, pending, pending_kernels, pending_host, pending_foreign;
	_Atomic uint32_t pending_graphs;
	_Atomic uint32_t pending_copies;
	uint64_t next_sequence;
	uint64_t kernel_clock_ns; /* up to here the SMs' time has been given out */
	uint64_t kernels_left_ns; /* SM time that the queued kernels still need */
	uint64_t last_step_ns;
	struct CUstream_st *active_first, *active_last;
	struct CUstream_st *running; /* with its head kernel begun */
};

bool sim_mutex_init(pthread_mutex_t *mutex);
bool sim_engine_init(struct sim_engine *engine, struct sim_device *device);
bool sim_engine_start(struct sim_engine *engine); /* its thread; once, at the first context */

/* Queue one item. Blocks while the stream is full. Takes over what the item owns, also on failure. */
CUresult sim_engine_submit(CUstream stream, const struct sim_work *work);
/* The launch path: the same for a kernel of this duration. */
CUresult sim_engine_submit_kernel(CUstream stream, uint64_t duration_ns);
CUresult sim_engine_record(CUstream stream, CUevent event);

bool sim_engine_stream_done(CUstream stream); /* advances simulated time to now first */
void sim_engine_wait_stream(CUstream stream);
void sim_engine_wait_context(CUcontext context);
void sim_engine_wait_copies(struct sim_engine *engine);
bool sim_engine_event_done(CUevent event);
void sim_engine_wait_event(CUevent event);
void sim_engine_retire_stream(CUstream stream); /* destroy now, or when its work is done */
void sim_engine_empty_legacy(CUcontext context); /* its queue is idle and will not be used again */
bool sim_engine_abort(struct sim_engine *engine); /* drop all work; true when there was some */

/* ---- pools and graph memory ------------------------------------------------------------------------------------------ */

struct CUmemPoolHandle_st {
	struct sim_object object;
	struct sim_device *device;
	bool is_default, destroyed;
	CUmemPoolProps properties;
	struct sim_heap heap;
	struct sim_segment *arenas;
	struct sim_unit *vacant; /* a list */
	uint64_t live; /* allocations not freed */
	uint64_t reserved, reserved_high, used, used_high;
	uint64_t release_threshold;
	int reuse_follow_event, reuse_opportunistic, reuse_internal;
	CUevent freed; /* recorded behind the newest asynchronous free, which lies behind all earlier ones */
	_Atomic uint64_t freed_on; /* id of the stream of that */
	CUmemAccess_flags access[SIM_MAX_GPUS];
	CUmemoryPool next;
};

/* Give back what pools of the device hold above their thresholds; called after every synchronisation. */
void sim_pools_settle(struct sim_device *device);
/* Give back everything free in every pool of the device: the last resort before an allocation is refused. Memory lock held. */
bool sim_pools_release_all(struct sim_device *device);
bool sim_pool_init_default(struct sim_device *device);
CUresult sim_pool_free(CUdeviceptr address, CUstream stream); /* stream NULL: the caller has synchronised */
CUevent sim_event_new(CUcontext context, unsigned flags);

struct sim_graph_memory { /* under the memory lock */
	uint64_t reserved, reserved_high, used, used_high;
};

/* ---- devices and contexts -------------------------------------------------------------------------------------------- */

struct sim_device {
	int ordinal;
	uint32_t gpu; /* minor number: index in topology.gpus and state.gpus */
	const struct sim_gpu *hardware;
	struct sim_gpu_state *shared;
	struct sim_domain domain;
	bool is_mig;
	CUuuid uuid, gpu_uuid;
	char name[SIM_NAME_LEN];
	uint32_t sm_count, threads_per_sm, blocks_per_sm;

	CUcontext primary; /* under sim_context_lock */
	uint32_t primary_references;
	unsigned primary_flags;
	uint32_t contexts;
	_Atomic uint64_t next_reap_check_ns;

	struct sim_memory memory;
	struct sim_engine engine;
	CUmemoryPool default_pool, current_pool, pools; /* under the memory lock */
	_Atomic bool pools_unsettled; /* something was freed into a pool since the last sim_pools_settle */
	struct sim_graph_memory graph_memory;
};

struct CUctx_st {
	struct sim_object object;
	struct sim_device *device;
	uint64_t id;
	unsigned flags, api_version;
	bool primary;
	uint32_t attachments;
	_Atomic bool destroyed;
	_Atomic uint32_t sticky; /* a CUresult that every later call answers */
	_Atomic uint32_t fault_epoch;
	uint32_t lost_incidents, ecc_incidents; /* of the GPU when the context was made */
	_Atomic uint64_t blocking_ready_ns; /* end of the last item on any stream that the legacy stream waits for; engine lock */
	size_t limits[8];
	uint64_t limit_bytes; /* device memory that raised limits cost, and what modules that call malloc or printf brought; … */
	bool has_heap, has_print_buffer; /* … under sim_context_lock */
	CUfunc_cache cache_config;
	bool peers[SIM_MAX_GPUS];
	struct CUstream_st legacy;
	CUstream streams; /* the others, linked by next_of_context; under sim_context_lock */
	CUmodule modules; /* under sim_context_lock */
	CUcontext next_destroyed;
};

struct sim_cuda {
	_Atomic int ready; /* 1 after cuInit; back to 0 in a forked child */
	_Atomic int forked; /* a child of an initialised process */
	struct sim_state *state;
	_Atomic int slot; /* -1 until the process must hold something */
	int n_devices;
	struct sim_device devices[SIM_MAX_GPUS];
};
extern struct sim_cuda sim_cuda;

struct sim_thread {
	CUcontext current;
	CUcontext *stack; /* below the current one */
	uint32_t depth, capacity;
	CUstreamCaptureMode capture_mode;
	uint64_t stream_context_id; /* the context of the cached per-thread stream */
	CUstream stream;
};
extern __thread struct sim_thread sim_thread __attribute__((tls_model("initial-exec")));

extern pthread_mutex_t sim_context_lock;

bool sim_claim_slot(void);
struct sim_device *sim_device_of(CUdevice ordinal); /* NULL: no such ordinal */
struct sim_device *sim_device_at(const CUmemLocation *location, CUresult *why); /* NULL and why: no device, or not a simulated one */
struct sim_device *sim_device_of_domain(const struct sim_domain *domain); /* NULL: not visible to this process */
bool sim_devices_linked(const struct sim_device *a, const struct sim_device *b, bool *by_nvlink);
CUresult sim_context_check_slow(CUcontext context);
void sim_stream_init_legacy(CUcontext context);
void sim_streams_delete(CUcontext context);

static inline bool sim_ready(void)
{
	return sim_likely(atomic_load_explicit(&sim_cuda.ready, memory_order_acquire));
}

/* CUDA_SUCCESS when calls may continue in this context: alive, and no new fault of its GPU. */
static inline CUresult sim_context_check(CUcontext context)
{
	uint32_t epoch = atomic_load_explicit(&context->device->shared->fault_epoch, memory_order_relaxed);
	if (sim_likely(epoch == atomic_load_explicit(&context->fault_epoch, memory_order_relaxed) &&
		       !atomic_load_explicit(&context->sticky, memory_order_relaxed) &&
		       !atomic_load_explicit(&context->destroyed, memory_order_relaxed)))
		return CUDA_SUCCESS;
	return sim_context_check_slow(context);
}

/* The current context, ready for use. */
static inline CUresult sim_current(CUcontext *context)
{
	if (!sim_ready())
		return CUDA_ERROR_NOT_INITIALIZED;
	*context = sim_thread.current;
	if (sim_unlikely(!*context))
		return CUDA_ERROR_INVALID_CONTEXT;
	return sim_context_check(*context);
}

#define SIM_TRY(call)                                          \
	do {                                                   \
		CUresult try_result_ = (call);                 \
		if (sim_unlikely(try_result_ != CUDA_SUCCESS)) \
			return try_result_;                    \
	} while (0)

#define SIM_REQUIRE_READY() do { if (!sim_ready()) return CUDA_ERROR_NOT_INITIALIZED; } while (0)
#define SIM_REQUIRE(condition) do { if (sim_unlikely(!(condition))) return CUDA_ERROR_INVALID_VALUE; } while (0)

/* The stream behind a handle, in a context that may go on. NULL and 1 are the current context's legacy stream, 2 the thread's own. */
CUresult sim_stream_of(CUstream handle, CUstream *stream);
CUresult sim_default_stream(CUcontext context, CUstream handle, CUstream *stream);
/* For the `_ptsz` and `_ptds` twins: NULL means the calling thread's stream. */
static inline CUstream sim_own(CUstream handle)
{
	return handle ? handle : CU_STREAM_PER_THREAD;
}

/* Host memory known to the driver: made by it or registered with it. */
struct sim_host_range {
	uint64_t base, bytes, id;
	unsigned flags;
	bool registered;
	CUcontext owner;
};
bool sim_host_find(const void *address, struct sim_host_range *out);
void sim_host_free_owned(CUcontext owner);

/* ---- arrays, modules ------------------------------------------------------------------------------------------------- */

struct CUarray_st {
	struct sim_object object;
	CUcontext context;
	CUmipmappedArray mipmap; /* the level it belongs to; NULL when it stands alone */
	CUDA_ARRAY3D_DESCRIPTOR descriptor;
	CUdeviceptr memory;
	uint64_t pitch, rows, planes, bytes;
};
uint32_t sim_array_texel_bytes(const CUDA_ARRAY3D_DESCRIPTOR *descriptor);

/* CUkernel and CUfunction are the same object here. */
struct CUfunc_st {
	struct sim_object object;
	CUmodule module;
	const struct sim_image_kernel *kernel; /* what the image says about it */
	bool spins; /* takes its duration in microseconds as first parameter */
	int max_dynamic_shared_bytes, carveout, cache_config;
	int cluster_must_be_set, non_portable_cluster, cluster_policy;
	unsigned cluster[3];
	unsigned block[3], shared_bytes, parameter_bytes; /* old launch calls set these up */
	uint8_t parameters[64];
	CUfunction next;
};

/* A module's code and variables in one context. `context` NULL: free for another context. Entries stay until the module goes, so that
 * launches walk the list without a lock. */
struct sim_instance {
	_Atomic(CUcontext) context;
	CUdeviceptr code;
	CUdeviceptr *blocks; /* by block of the image; 0: managed */
	struct sim_instance *next;
};

struct CUmod_st {
	struct sim_object object;
	CUcontext context; /* NULL: a library, which belongs to no context */
	bool is_library;
	struct sim_image image;
	CUfunction functions, last_function;
	unsigned n_functions;
	CUdeviceptr *managed; /* by block of the image, for all contexts; 0: not managed */
	_Atomic(struct sim_instance *) instances;
	CUmodule next; /* of the context, or of all libraries */
};
CUresult sim_module_new(const void *image, uint64_t bytes, CUmodule *out); /* bytes 0: as the image itself says */
CUresult sim_module_read_file(const char *path, void **image, uint64_t *bytes);
void sim_module_delete(CUmodule module);
CUfunction sim_module_find(CUmodule module, const char *name);
void sim_module_list(CUmodule module, CUfunction *functions, unsigned count);
CUresult sim_module_function(CUmodule module, const char *name, CUfunction *out);
CUresult sim_module_variable(CUmodule module, CUcontext context, const char *name, CUdeviceptr *address, size_t *bytes);
void sim_jit_options(unsigned int n_options, const CUjit_option *options, void **values);

/* The code and variables of a library come into a context when something of it is first used there. */
bool sim_module_is_loaded(CUmodule module, CUcontext context);
CUresult sim_module_load(CUmodule module, CUcontext context);
void sim_library_list(CUmodule module);
void sim_libraries_leave(CUcontext context);
static inline CUresult sim_function_load(CUfunction function, CUcontext context)
{
	return sim_likely(!function->module->is_library) ? CUDA_SUCCESS : sim_module_load(function->module, context);
}

/* The first module whose code calls malloc brings the heap to a context, and the first that calls printf the print buffer. */
CUresult sim_context_provide(CUcontext context, const struct sim_image *image);

#define SIM_STACK_BYTES 1024u /* of each thread, in the price of a context */

/* A context's stacks grow to what a kernel needs that is launched in it, and are not given back. */
CUresult sim_context_raise_stack(CUcontext context, size_t bytes);
static inline CUresult sim_function_prepare(CUfunction function, CUcontext context)
{
	SIM_TRY(sim_function_load(function, context));
	if (sim_likely(function->kernel->local_bytes <= SIM_STACK_BYTES))
		return CUDA_SUCCESS;
	return sim_context_raise_stack(context, function->kernel->local_bytes);
}

struct sim_launch {
	unsigned grid[3], block[3], shared_bytes;
	bool cooperative;
	void **parameters, **extra;
};
/* What the kernel's parameters of eight bytes point to. */
void sim_launch_touched(CUfunction function, const struct sim_launch *launch, struct sim_touched *touched);
/* Validates, and returns how long it takes on this device. */
CUresult sim_launch_duration(CUfunction function, const struct sim_device *device, const struct sim_launch *launch, uint64_t *duration_ns);

/* ---- graphs ---------------------------------------------------------------------------------------------------------- */

/* When a stream captures, a call becomes a node instead of work. */
CUresult sim_capture_kernel(CUstream stream, CUfunction function, const struct sim_launch *launch);
CUresult sim_capture_copy(CUstream stream, const CUDA_MEMCPY3D *copy);
CUresult sim_capture_fill(CUstream stream, const CUDA_MEMSET_NODE_PARAMS *fill);
CUresult sim_capture_values(CUstream stream, unsigned count, const CUstreamBatchMemOpParams *operations);
CUresult sim_capture_host(CUstream stream, CUhostFn run, void *data);
CUresult sim_capture_allocate(CUstream stream, const CUmemPoolProps *properties, size_t bytes, CUdeviceptr *out);
CUresult sim_capture_free(CUstream stream, CUdeviceptr address);
CUresult sim_capture_event_record(CUstream stream, CUevent event);
CUresult sim_capture_event_wait(CUstream stream, CUevent event);
CUresult sim_capture_graph(CUstream stream, CUgraph graph);
/* A call that a running capture does not allow (for example synchronising the stream): invalidates the capture. */
CUresult sim_capture_refuse(CUstream stream);
void sim_capture_forget_event(CUevent event);
void sim_capture_abandon(CUstream stream);

static inline bool sim_capturing(CUstream stream)
{
	return sim_unlikely(__atomic_load_n(&stream->capture, __ATOMIC_ACQUIRE) != NULL);
}

/* For calls that may do work elsewhere unasked (cuMemAlloc): refused while this thread captures, or anyone captures globally. */
extern _Atomic uint32_t sim_active_captures;
CUresult sim_capture_unsafe_call_slow(void);
static inline CUresult sim_capture_unsafe_call(void)
{
	return sim_likely(atomic_load_explicit(&sim_active_captures, memory_order_relaxed) == 0) ? CUDA_SUCCESS
												 : sim_capture_unsafe_call_slow();
}

/* Between cuda_graph.c and cuda_capture.c. The nodes come without dependencies. */
CUgraph sim_graph_new(void);
void sim_graph_delete(CUgraph graph);
CUresult sim_graph_add_kernel(CUgraph graph, CUfunction function, CUcontext context, const struct sim_launch *launch, CUgraphNode *out);
CUresult sim_graph_add_copy(CUgraph graph, const CUDA_MEMCPY3D *copy, CUcontext context, CUgraphNode *out);
CUresult sim_graph_add_fill(CUgraph graph, const CUDA_MEMSET_NODE_PARAMS *fill, CUcontext context, CUgraphNode *out);
CUresult sim_graph_add_values(CUgraph graph, const CUDA_BATCH_MEM_OP_NODE_PARAMS *batch, CUcontext context, CUgraphNode *out);
CUresult sim_graph_add_host(CUgraph graph, CUhostFn run, void *data, CUgraphNode *out);
CUresult sim_graph_add_allocation(CUgraph graph, const CUmemPoolProps *properties, size_t bytes, CUdeviceptr *address, CUgraphNode *out);
CUresult sim_graph_add_free(CUgraph graph, CUdeviceptr address, CUgraphNode *out);
CUresult sim_graph_add_child(CUgraph graph, CUgraph child, CUgraphNode *out);
CUresult sim_graph_depend(CUgraphNode node, const CUgraphNode *on, size_t count);
bool sim_graph_leads_to(CUgraphNode from, CUgraphNode to); /* `to` depends on `from`, or is it */
CUgraph sim_graph_of_node(CUgraphNode node);

/* References to user objects, in cuda_user.c: of a graph, and of a program. `add` adds one to each object of `from`. */
struct sim_user_hold **sim_graph_user_holds(CUgraph graph);
bool sim_user_holds_add(struct sim_user_hold **to, const struct sim_user_hold *from);
void sim_user_holds_release(struct sim_user_hold **holds);

CUresult sim_graph_free_allocation(CUdeviceptr address); /* cuMemFree or cuMemFreeAsync of memory that a graph made */

/* Resolves a copy between host, device and arrays to addresses of bytes; `seconds` of bus time go to *duration_ns. */
CUresult sim_copy_resolve(const CUDA_MEMCPY3D *copy, const struct sim_device *device, struct sim_copy_3d *out, uint64_t *duration_ns);
CUresult sim_fill_resolve(const CUDA_MEMSET_NODE_PARAMS *fill, const struct sim_device *device, struct sim_fill *out,
			  uint64_t *duration_ns);
/* Bytes from its first to its last. */
uint64_t sim_fill_span(const CUDA_MEMSET_NODE_PARAMS *fill);

#define SIM_MAX_VALUES 255u /* operations in one batch */
/* Checks stream memory operations and makes items of them; `work` has room for `count`, and *n_work of it are used. */
CUresult sim_values_resolve(unsigned count, const CUstreamBatchMemOpParams *operations, const struct sim_device *device,
			    struct sim_work *work, unsigned *n_work);

#endif
