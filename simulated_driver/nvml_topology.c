/* SPDX-License-Identifier: Apache-2.0 */
/* nvml_topology.c - how devices lie to each other: PCIe tree, NUMA affinity, peer access, NVLink and fabric. */
#include <stdio.h>
#include <string.h>

#include "simulated_driver/nvml_prototypes.h"
#include "simulated_driver/nvml_internal.h"

/* ---- PCIe ---- */

static nvmlReturn_t two_gpus(nvmlDevice_t first, nvmlDevice_t second, struct sim_target *a, struct sim_target *b)
{
	nvmlReturn_t status = sim_nvml_gpu(first, a);
	return status == NVML_SUCCESS ? sim_nvml_gpu(second, b) : status;
}

NVML_API nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t first, nvmlDevice_t second, nvmlGpuTopologyLevel_t *level)
{
	struct sim_target a, b;
	nvmlReturn_t status = two_gpus(first, second, &a, &b);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(level);
	*level = (nvmlGpuTopologyLevel_t)sim_topology_common_ancestor(a.hardware, b.hardware);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, nvmlGpuTopologyLevel_t level, unsigned int *count,
						       nvmlDevice_t *devices)
{
	const uint32_t *visible;
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(count);
	unsigned int room = *count, found = 0;
	uint32_t n_visible = sim_nvml_visible_gpus(&visible);
	for (uint32_t i = 0; i < n_visible; i++) {
		if (visible[i] == t.index ||
		    sim_topology_common_ancestor(t.hardware, &t.state->topology.gpus[visible[i]]) != (unsigned)level)
			continue;
		if (devices && found < room)
			devices[found] = sim_nvml_gpu_handle(visible[i]);
		found++;
	}
	*count = found;
	return !devices || found <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

NVML_API nvmlReturn_t nvmlSystemGetTopologyGpuSet(unsigned int cpu, unsigned int *count, nvmlDevice_t *devices)
{
	struct sim_state *state;
	const uint32_t *visible;
	nvmlReturn_t status = sim_nvml_enter(&state);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(count && cpu < SIM_MAX_CPUS);
	unsigned int room = *count, found = 0;
	uint32_t n_visible = sim_nvml_visible_gpus(&visible);
	for (uint32_t i = 0; i < n_visible; i++) {
		const struct sim_numa_node *node = &state->topology.numa_nodes[state->topology.gpus[visible[i]].numa_node];
		if (!(node->cpu_mask[cpu / 64] >> cpu % 64 & 1))
			continue;
		if (devices && found < room)
			devices[found] = sim_nvml_gpu_handle(visible[i]);
		found++;
	}
	*count = found;
	return !devices || found <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

NVML_API nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t first, nvmlDevice_t second, int *same)
{
	struct sim_target a, b;
	nvmlReturn_t status = two_gpus(first, second, &a, &b);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(same);
	*same = a.index == b.index;
	return NVML_SUCCESS;
}

/* ---- affinity ---- */

static nvmlReturn_t fill_mask(const uint64_t *mask, unsigned mask_words, unsigned long *set, unsigned int set_size)
{
	REQUIRE_ARGUMENT(set && set_size);
	memset(set, 0, set_size * sizeof *set);
	for (unsigned bit = 0; bit < mask_words * 64; bit++) {
		if (!(mask[bit / 64] >> bit % 64 & 1))
			continue;
		unsigned word = bit / (8 * sizeof *set);
		if (word < set_size)    /* what does not fit is cut off, as the driver does */
			set[word] |= 1ul << bit % (8 * sizeof *set);
	}
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned int set_size, unsigned long *set,
							  unsigned int scope)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(scope == NVML_AFFINITY_SCOPE_NODE || scope == NVML_AFFINITY_SCOPE_SOCKET);
	return fill_mask(t.state->topology.numa_nodes[t.hardware->numa_node].cpu_mask, SIM_MAX_CPUS / 64, set, set_size);
}

NVML_API nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int set_size, unsigned long *set)
{
	return nvmlDeviceGetCpuAffinityWithinScope(device, set_size, set, NVML_AFFINITY_SCOPE_NODE);
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int set_size, unsigned long *set, unsigned int scope)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(scope == NVML_AFFINITY_SCOPE_NODE || scope == NVML_AFFINITY_SCOPE_SOCKET);
	uint64_t mask = 1ull << t.hardware->numa_node;
	return fill_mask(&mask, 1, set, set_size);
}

/* The NUMA node that the GPU's own memory forms; only coherent platforms (Grace) have one, and those are not simulated. */
NVML_API nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t device, unsigned int *node)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(node);
	return NVML_ERROR_NOT_SUPPORTED;
}

/* ---- peer access ---- */

static bool partitioned(const struct sim_target *t)
{
	return atomic_load(&t->mig.enabled);
}

/* PCIe peer traffic does not cross sockets, and atomics need NVLink. */
static nvmlGpuP2PStatus_t peer_status(const struct sim_target *a, const struct sim_target *b, nvmlGpuP2PCapsIndex_t capability)
{
	bool linked = sim_topology_nvlinks_between(&a->state->topology, a->hardware, b->hardware) > 0;
	bool near = sim_topology_common_ancestor(a->hardware, b->hardware) <= NVML_TOPOLOGY_NODE;
	if (partitioned(a) || partitioned(b))
		return NVML_P2P_STATUS_NOT_SUPPORTED;
	switch (capability) {
	case NVML_P2P_CAPS_INDEX_READ:
	case NVML_P2P_CAPS_INDEX_WRITE: return linked || near ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED;
	case NVML_P2P_CAPS_INDEX_NVLINK:
	case NVML_P2P_CAPS_INDEX_ATOMICS: return linked ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_NOT_SUPPORTED;
	case NVML_P2P_CAPS_INDEX_PROP: return near ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED;
	case NVML_P2P_CAPS_INDEX_UNKNOWN: break;
	}
	return NVML_P2P_STATUS_UNKNOWN;
}

NVML_API nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t first, nvmlDevice_t second, nvmlGpuP2PCapsIndex_t capability,
					     nvmlGpuP2PStatus_t *p2p)
{
	struct sim_target a, b;
	nvmlReturn_t status = two_gpus(first, second, &a, &b);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(p2p && a.index != b.index && capability < NVML_P2P_CAPS_INDEX_UNKNOWN);
	*p2p = peer_status(&a, &b, capability);
	return NVML_SUCCESS;
}

/* ---- NVLink ---- */

/* A link of a GPU that has NVLink at all. */
static nvmlReturn_t find_link(nvmlDevice_t device, unsigned int link, struct sim_target *t, const struct sim_nvlink **out)
{
	nvmlReturn_t status = sim_nvml_gpu(device, t);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(link < NVML_NVLINK_MAX_LINKS);
	REQUIRE(t->hardware->nvlink_version, NVML_ERROR_NOT_SUPPORTED);
	REQUIRE_ARGUMENT(link < t->hardware->nvlink_count);
	*out = &t->hardware->nvlinks[link];
	return NVML_SUCCESS;
}

#define LINK(device, link)                                               \
	struct sim_target t;                                             \
	const struct sim_nvlink *nvlink;                                 \
	nvmlReturn_t link_status = find_link(device, link, &t, &nvlink); \
	REQUIRE(link_status == NVML_SUCCESS, link_status)

/* A link to a GPU that fell off the bus goes down with it. */
static bool link_active(const struct sim_target *t, const struct sim_nvlink *link)
{
	return link->peer_kind != SIM_LINK_NONE && !(link->peer_kind == SIM_LINK_GPU && atomic_load(&t->state->gpus[link->peer].lost));
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *active)
{
	LINK(device, link);
	REQUIRE_ARGUMENT(active);
	*active = link_active(&t, nvlink) ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned int link, unsigned int *version)
{
	static const unsigned int by_generation[] = { 0,
						      NVML_NVLINK_VERSION_1_0,
						      NVML_NVLINK_VERSION_2_0,
						      NVML_NVLINK_VERSION_3_0,
						      NVML_NVLINK_VERSION_4_0,
						      NVML_NVLINK_VERSION_5_0 };
	LINK(device, link);
	REQUIRE_ARGUMENT(version);
	REQUIRE(t.hardware->nvlink_version < sizeof by_generation / sizeof *by_generation, NVML_ERROR_UNKNOWN);
	*version = by_generation[t.hardware->nvlink_version];
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned int link, nvmlNvLinkCapability_t capability,
						    unsigned int *value)
{
	LINK(device, link);
	REQUIRE_ARGUMENT(value && capability < NVML_NVLINK_CAP_COUNT);
	bool peer_access = capability == NVML_NVLINK_CAP_P2P_SUPPORTED || capability == NVML_NVLINK_CAP_P2P_ATOMICS ||
			   capability == NVML_NVLINK_CAP_SYSMEM_ACCESS || capability == NVML_NVLINK_CAP_SYSMEM_ATOMICS;
	*value = capability == NVML_NVLINK_CAP_VALID || (peer_access && link_active(&t, nvlink));
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link, nvmlIntNvLinkDeviceType_t *type)
{
	LINK(device, link);
	REQUIRE_ARGUMENT(type);
	REQUIRE(nvlink->peer_kind != SIM_LINK_NONE, NVML_ERROR_NOT_SUPPORTED);
	*type = nvlink->peer_kind == SIM_LINK_SWITCH ? NVML_NVLINK_DEVICE_TYPE_SWITCH : NVML_NVLINK_DEVICE_TYPE_GPU;
	return NVML_SUCCESS;
}

/* A link that another GPU has and this one has not is NOT_SUPPORTED here: nvidia-smi queries 18 links of any GPU, and INVALID_ARGUMENT ends
 * it. */
NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci)
{
	struct sim_target t;
	const struct sim_nvlink *nvlink;
	nvmlReturn_t status = find_link(device, link, &t, &nvlink);
	REQUIRE(status != NVML_ERROR_INVALID_ARGUMENT || link >= NVML_NVLINK_MAX_LINKS, NVML_ERROR_NOT_SUPPORTED);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(pci);
	REQUIRE(nvlink->peer_kind != SIM_LINK_NONE, NVML_ERROR_NOT_SUPPORTED);
	const struct sim_topology *topology = &t.state->topology;
	const struct sim_pci_address *address = nvlink->peer_kind == SIM_LINK_SWITCH ? &topology->switches[nvlink->peer].pci
										     : &topology->gpus[nvlink->peer].pci;
	memset(pci, 0, sizeof *pci);
	pci->domain = address->domain;
	pci->bus = address->bus;
	pci->device = address->device;
	sim_format_pci_address(address, pci->busId, sizeof pci->busId);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned int link, nvmlPciInfo_v2_t *pci)
{
	nvmlPciInfo_t full;
	REQUIRE_ARGUMENT(pci);
	nvmlReturn_t status = nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, &full);
	REQUIRE(status == NVML_SUCCESS, status);
	*pci = (nvmlPciInfo_v2_t){ .domain = full.domain, .bus = full.bus, .device = full.device };
	snprintf(pci->busId, sizeof pci->busId, "%04X:%02X:%02X.0", full.domain & 0xffff, full.bus & 0xff, full.device & 0x1f);
	return NVML_SUCCESS;
}

/* Simulated links make no errors. */
NVML_API nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned int link, nvmlNvLinkErrorCounter_t counter,
						      unsigned long long *value)
{
	LINK(device, link);
	REQUIRE_ARGUMENT(value && counter < NVML_NVLINK_ERROR_COUNT);
	REQUIRE(link_active(&t, nvlink), NVML_ERROR_NOT_SUPPORTED);
	*value = 0;
	return NVML_SUCCESS;
}

/* ---- fabric ---- */

/* Two bits per condition; 2 means "known to be false". Degraded bandwidth, route recovery, unhealthy route, access timeout recovery. */
#define FABRIC_NOTHING_WRONG (2u | 2u << 2 | 2u << 4 | 2u << 6)

NVML_API nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfo_v3_t *info)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(info);
	bool v3 = info->version == NVML_VERSION_WORD(nvmlGpuFabricInfo_v3_t, 3);
	REQUIRE(v3 || info->version == NVML_VERSION_WORD(nvmlGpuFabricInfo_v2_t, 2), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	REQUIRE(t.hardware->architecture >= NVML_DEVICE_ARCH_HOPPER, NVML_ERROR_NOT_SUPPORTED);
	bool attached = t.hardware->fabric_attached;
	memcpy(info->clusterUuid, t.hardware->fabric_cluster_uuid, sizeof info->clusterUuid);
	info->status = NVML_SUCCESS;
	info->cliqueId = t.hardware->fabric_clique;
	info->state = attached ? NVML_GPU_FABRIC_STATE_COMPLETED : NVML_GPU_FABRIC_STATE_NOT_SUPPORTED;
	info->healthMask = attached ? FABRIC_NOTHING_WRONG : 0;
	if (v3)
		info->healthSummary = attached ? NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY : NVML_GPU_FABRIC_HEALTH_SUMMARY_NOT_SUPPORTED;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *info)
{
	nvmlGpuFabricInfo_v3_t full = { .version = NVML_VERSION_WORD(nvmlGpuFabricInfo_v3_t, 3) };
	REQUIRE_ARGUMENT(info);
	nvmlReturn_t status = nvmlDeviceGetGpuFabricInfoV(device, &full);
	REQUIRE(status == NVML_SUCCESS, status);
	memcpy(info->clusterUuid, full.clusterUuid, sizeof info->clusterUuid);
	info->status = full.status;
	info->cliqueId = full.cliqueId;
	info->state = full.state;
	return NVML_SUCCESS;
}
