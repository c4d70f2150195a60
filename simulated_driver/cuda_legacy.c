/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_legacy.c - the entry points from before CUDA 3.2 with 32-bit device pointers and sizes.
 *
 * New programs do not use them, but the real library exports them, so a limit that forgets them can be bypassed. Their allocations lie
 * below 4 GiB; all else is the modern call.
 */
#include "simulated_driver/cuda_internal.h"

static unsigned clamp(size_t value)
{
	return value > UINT32_MAX ? UINT32_MAX : (unsigned)value;
}

CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice device)
{
	size_t wide;
	SIM_REQUIRE(bytes);
	SIM_TRY(cuDeviceTotalMem_v2(&wide, device));
	*bytes = clamp(wide);
	return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(unsigned int *free_bytes, unsigned int *total_bytes)
{
	size_t free_wide, total_wide;
	SIM_REQUIRE(free_bytes || total_bytes);
	SIM_TRY(cuMemGetInfo_v2(&free_wide, &total_wide));
	if (free_bytes)
		*free_bytes = clamp(free_wide);
	if (total_bytes)
		*total_bytes = clamp(total_wide);
	return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr_v1 *out, unsigned int bytes)
{
	CUcontext context;
	CUdeviceptr wide;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(out && bytes);
	SIM_TRY(sim_capture_unsafe_call());
	SIM_TRY(sim_memory_allocate_low(context->device, context, bytes, &wide));
	*out = (CUdeviceptr_v1)wide;
	return CUDA_SUCCESS;
}

CUresult cuMemAllocPitch(CUdeviceptr_v1 *out, unsigned int *pitch, unsigned int width, unsigned int height, unsigned int element_bytes)
{
	SIM_REQUIRE(pitch && width && height && (element_bytes == 4 || element_bytes == 8 || element_bytes == 16));
	uint64_t row = ((uint64_t)width + 511) / 512 * 512, total = row * height;
	if (total > UINT32_MAX)
		return CUDA_ERROR_OUT_OF_MEMORY;
	SIM_TRY(cuMemAlloc(out, (unsigned)total));
	*pitch = (unsigned)row;
	return CUDA_SUCCESS;
}

CUresult cuMemFree(CUdeviceptr_v1 address)
{
	return cuMemFree_v2(address);
}

CUresult cuMemGetAddressRange(CUdeviceptr_v1 *base, unsigned int *bytes, CUdeviceptr_v1 address)
{
	CUdeviceptr wide_base;
	size_t wide_bytes;
	SIM_TRY(cuMemGetAddressRange_v2(&wide_base, &wide_bytes, address));
	if (base)
		*base = (CUdeviceptr_v1)wide_base;
	if (bytes)
		*bytes = clamp(wide_bytes);
	return CUDA_SUCCESS;
}

CUresult cuMemAllocHost(void **out, unsigned int bytes)
{
	return cuMemAllocHost_v2(out, bytes);
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr_v1 *out, void *memory, unsigned int flags)
{
	CUdeviceptr wide;
	SIM_REQUIRE(out);
	SIM_TRY(cuMemHostGetDevicePointer_v2(&wide, memory, flags));
	if (wide > UINT32_MAX)
		return CUDA_ERROR_INVALID_VALUE;    /* does not fit into this call's pointers */
	*out = (CUdeviceptr_v1)wide;
	return CUDA_SUCCESS;
}

CUresult cuModuleGetGlobal(CUdeviceptr_v1 *address, unsigned int *bytes, CUmodule module, const char *name)
{
	CUdeviceptr wide;
	size_t wide_bytes;
	SIM_TRY(cuModuleGetGlobal_v2(&wide, &wide_bytes, module, name));
	if (wide > UINT32_MAX)
		return CUDA_ERROR_INVALID_VALUE;
	if (address)
		*address = (CUdeviceptr_v1)wide;
	if (bytes)
		*bytes = clamp(wide_bytes);
	return CUDA_SUCCESS;
}

/* clang-format off */
CUresult cuMemcpyHtoD(CUdeviceptr_v1 to, const void *from, unsigned int n) { return cuMemcpyHtoD_v2(to, from, n); }
CUresult cuMemcpyDtoH(void *to, CUdeviceptr_v1 from, unsigned int n) { return cuMemcpyDtoH_v2(to, from, n); }
CUresult cuMemcpyDtoD(CUdeviceptr_v1 to, CUdeviceptr_v1 from, unsigned int n) { return cuMemcpyDtoD_v2(to, from, n); }
CUresult cuMemcpyHtoDAsync(CUdeviceptr_v1 to, const void *from, unsigned int n, CUstream s) { return cuMemcpyHtoDAsync_v2(to, from, n, s); }
CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr_v1 from, unsigned int n, CUstream s) { return cuMemcpyDtoHAsync_v2(to, from, n, s); }
CUresult cuMemcpyDtoDAsync(CUdeviceptr_v1 to, CUdeviceptr_v1 from, unsigned int n, CUstream s)
{
	return cuMemcpyDtoDAsync_v2(to, from, n, s);
}
/* clang-format on */

CUresult cuMemsetD8(CUdeviceptr_v1 to, unsigned char value, unsigned int n)
{
	return cuMemsetD8_v2(to, value, n);
}
CUresult cuMemsetD16(CUdeviceptr_v1 to, unsigned short value, unsigned int n)
{
	return cuMemsetD16_v2(to, value, n);
}
CUresult cuMemsetD32(CUdeviceptr_v1 to, unsigned int value, unsigned int n)
{
	return cuMemsetD32_v2(to, value, n);
}
CUresult cuMemsetD2D8(CUdeviceptr_v1 to, unsigned int pitch, unsigned char value, unsigned int width, unsigned int height)
{
	return cuMemsetD2D8_v2(to, pitch, value, width, height);
}
CUresult cuMemsetD2D16(CUdeviceptr_v1 to, unsigned int pitch, unsigned short value, unsigned int width, unsigned int height)
{
	return cuMemsetD2D16_v2(to, pitch, value, width, height);
}
CUresult cuMemsetD2D32(CUdeviceptr_v1 to, unsigned int pitch, unsigned int value, unsigned int width, unsigned int height)
{
	return cuMemsetD2D32_v2(to, pitch, value, width, height);
}

CUresult cuArrayCreate(CUarray *out, const CUDA_ARRAY_DESCRIPTOR_v1 *descriptor)
{
	SIM_REQUIRE(descriptor);
	CUDA_ARRAY_DESCRIPTOR wide = { descriptor->Width, descriptor->Height, descriptor->Format, descriptor->NumChannels };
	return cuArrayCreate_v2(out, &wide);
}

CUresult cuArrayGetDescriptor(CUDA_ARRAY_DESCRIPTOR_v1 *descriptor, CUarray array)
{
	CUDA_ARRAY_DESCRIPTOR wide;
	SIM_REQUIRE(descriptor);
	SIM_TRY(cuArrayGetDescriptor_v2(&wide, array));
	*descriptor = (CUDA_ARRAY_DESCRIPTOR_v1){ clamp(wide.Width), clamp(wide.Height), wide.Format, wide.NumChannels };
	return CUDA_SUCCESS;
}

CUresult cuArray3DCreate(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR_v1 *descriptor)
{
	SIM_REQUIRE(descriptor);
	CUDA_ARRAY3D_DESCRIPTOR wide = { descriptor->Width,  descriptor->Height,      descriptor->Depth,
					 descriptor->Format, descriptor->NumChannels, descriptor->Flags };
	return cuArray3DCreate_v2(out, &wide);
}

CUresult cuArray3DGetDescriptor(CUDA_ARRAY3D_DESCRIPTOR_v1 *descriptor, CUarray array)
{
	CUDA_ARRAY3D_DESCRIPTOR wide;
	SIM_REQUIRE(descriptor);
	SIM_TRY(cuArray3DGetDescriptor_v2(&wide, array));
	*descriptor = (CUDA_ARRAY3D_DESCRIPTOR_v1){ clamp(wide.Width), clamp(wide.Height), clamp(wide.Depth),
						    wide.Format,       wide.NumChannels,   wide.Flags };
	return CUDA_SUCCESS;
}
