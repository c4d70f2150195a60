/* SPDX-License-Identifier: Apache-2.0 */
/* topology.h - the hardware of one simulated node, as a plain value.
 *
 * `struct sim_topology` is the content of a topology text: driver versions, GPUs, the PCIe tree, NVLink and the MIG instances that exist at
 * boot. It holds no pointers, because it is embedded in the mapped `state` file that every process of the node shares; after `aliquot-sim
 * init` it does not change. What does change (used memory, processes, MIG instances, faults) is in state.h and mig.h. The text format is
 * explained at the top of every file in simulated_driver/profiles/ and in docs/development/simulated-driver.md. */
#ifndef ALIQUOT_SIM_TOPOLOGY_H
#define ALIQUOT_SIM_TOPOLOGY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SIM_MAX_GPUS        16
#define SIM_MAX_NVLINKS     36  /* per GPU; what nvmlDeviceGetNvLinkState accepts */
#define SIM_MAX_SWITCHES    16
#define SIM_MAX_NUMA_NODES  8
#define SIM_MAX_CPUS        1024
#define SIM_MAX_INITIAL_MIG 7   /* MIG devices per GPU at boot */
#define SIM_MIG_SIZES       4
#define SIM_MIG_SHAPES      6

#define SIM_UUID_LEN        48  /* "GPU-" or "MIG-" and 36 characters, NUL, rounded up */
#define SIM_NAME_LEN        96
#define SIM_VERSION_LEN     32

enum sim_link_peer { SIM_LINK_NONE = 0, SIM_LINK_GPU, SIM_LINK_SWITCH };

struct sim_pci_address {
	uint32_t domain;
	uint32_t bus;
	uint32_t device;    /* the function is always 0 */
};

/* One NVLink of one GPU. */
struct sim_nvlink {
	uint32_t peer_kind;     /* enum sim_link_peer */
	uint32_t peer;          /* GPU minor, or index into switches[] */
	uint32_t peer_link;     /* the link's number at a peer GPU */
};

/* A MIG instance that exists when the node boots: a GPU instance with one compute instance that fills it. */
struct sim_initial_mig {
	uint32_t profile_id;        /* the driver's profile ID (19 = 1g on A100 and Hopper), see mig.h */
	uint32_t placement_start;   /* memory slice */
};

struct sim_gpu {
	char uuid[SIM_UUID_LEN];            /* "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx" */
	char name[SIM_NAME_LEN];            /* "NVIDIA H200" */
	char serial[32];
	char board_part_number[32];
	char vbios_version[32];
	uint32_t minor;                         /* /dev/nvidia<minor>; equals the index in gpus[] */
	uint32_t brand;                         /* nvmlBrandType_t */
	uint32_t architecture;                  /* nvmlDeviceArchitecture_t */
	uint32_t compute_major, compute_minor;

	uint64_t memory_bytes;                  /* the total of nvmlDeviceGetMemoryInfo_v2 */
	uint64_t memory_reserved_bytes;         /* of these, held back by driver and firmware; not available to CUDA */
	uint64_t bar1_bytes;
	uint64_t context_bytes;                 /* device memory one CUDA context costs */
	uint64_t l2_cache_bytes;
	uint32_t memory_bus_bits;
	uint32_t ecc_enabled;

	uint32_t sm_count;
	uint32_t core_count;                    /* CUDA cores */
	uint32_t graphics_clock_mhz;            /* maximum; also the SM clock */
	uint32_t memory_clock_mhz;
	uint32_t video_clock_mhz;
	uint32_t idle_graphics_clock_mhz;
	uint32_t idle_memory_clock_mhz;

	uint32_t power_idle_mw;
	uint32_t power_limit_mw;                /* default */
	uint32_t power_limit_min_mw, power_limit_max_mw;
	uint32_t temperature_idle_c, temperature_busy_c;
	uint32_t temperature_slowdown_c, temperature_shutdown_c;

	struct sim_pci_address pci;
	uint32_t pci_device_id;                 /* device << 16 | vendor, 0x233510de */
	uint32_t pci_subsystem_id;
	uint32_t pcie_generation, pcie_width;
	uint32_t numa_node;
	uint32_t host_bridge;                   /* numbers that are equal for GPUs below the same ... */
	uint32_t root_port;
	uint32_t pcie_switch;

	uint32_t nvlink_version;                /* 0: no NVLink */
	uint32_t nvlink_count;
	uint32_t nvlink_mbps;                   /* MB/s of one link, one direction */
	struct sim_nvlink nvlinks[SIM_MAX_NVLINKS];

	uint32_t fabric_attached;               /* the fabric manager has joined it to a clique */
	uint32_t fabric_clique;
	uint8_t fabric_cluster_uuid[16];

	uint32_t mig_family;                    /* enum sim_mig_family of mig.h; 0: not capable */
	uint32_t mig_enabled;                   /* at boot */
	uint64_t mig_memory_bytes[SIM_MIG_SIZES];   /* usable memory of a GPU instance of 1, 2, 4 and 8 memory slices */
	uint32_t mig_sm_counts[SIM_MIG_SHAPES];     /* SMs of a GPU instance: 1g, 1g with double memory, 2g, 3g, 4g, 7g */
	uint32_t n_initial_mig;
	struct sim_initial_mig initial_mig[SIM_MAX_INITIAL_MIG];
};

struct sim_switch {
	struct sim_pci_address pci;
};

struct sim_numa_node {
	uint32_t present;
	uint64_t cpu_mask[SIM_MAX_CPUS / 64];
};

struct sim_topology {
	char name[SIM_NAME_LEN];                /* the profile's own name */
	char node_name[SIM_NAME_LEN];           /* seeds the UUIDs and serials that the text leaves out */
	char driver_version[SIM_VERSION_LEN];   /* "580.159.03" */
	char nvml_version[SIM_VERSION_LEN];     /* "13.580.159.03" */
	int32_t cuda_version;                      /* 13000 */
	uint32_t n_gpus;
	uint32_t n_switches;
	uint32_t n_numa_nodes;
	struct sim_gpu gpus[SIM_MAX_GPUS];    /* in order of minor number */
	struct sim_switch switches[SIM_MAX_SWITCHES];
	struct sim_numa_node numa_nodes[SIM_MAX_NUMA_NODES];
};

/* Why a topology text was refused: "FILE:LINE: expected ..., found ...". */
struct sim_topology_error {
	char message[512];
};

/* Parse `text` (not NUL-terminated; `file` is only for messages) into `out`. `node_name` replaces the text's own when not NULL and not
 * empty. Returns false and fills `error` when the text is wrong; `out` is then undefined. */
bool sim_topology_parse(const char *text, size_t length, const char *file, const char *node_name, struct sim_topology *out,
			struct sim_topology_error *error);

/* Read and parse a file. */
bool sim_topology_load(const char *path, const char *node_name, struct sim_topology *out, struct sim_topology_error *error);

/* Replace the driver version; the NVML version follows. False when `version` is not like 580.159.03. */
bool sim_topology_set_driver(struct sim_topology *topology, const char *version);

/* The CUDA version that NVIDIA's driver of this version reports, like 12020; 0 for one older than 440. */
int32_t sim_topology_cuda_of_driver(const char *version);

/* The major number of the driver version: 580. */
unsigned sim_topology_driver_major(const struct sim_topology *topology);

/* How near two GPUs are on PCIe, as nvmlGpuTopologyLevel_t: 0 the same, 10 one switch, 20 several switches, 30 host bridge, 40 NUMA node,
 * 50 system. */
unsigned sim_topology_common_ancestor(const struct sim_gpu *a, const struct sim_gpu *b);

/* Number of NVLinks between two GPUs, directly or through switches. */
unsigned sim_topology_nvlinks_between(const struct sim_topology *topology, const struct sim_gpu *a, const struct sim_gpu *b);

/* "00000000:18:00.0", NVML's spelling of a PCI bus id; `buffer` holds at least 17 bytes. */
void sim_format_pci_address(const struct sim_pci_address *address, char *buffer, size_t size);

/* A UUID in text after `prefix` ("GPU-", "MIG-"), made from `seed`: the same seed gives the same UUID. */
void sim_format_seeded_uuid(const char *prefix, const char *seed, char out[SIM_UUID_LEN]);

#endif
