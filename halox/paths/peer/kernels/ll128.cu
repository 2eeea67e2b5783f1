// Shared text of the kernels that send LL128-like packets: 14 bytes of data and 2 bytes of the epoch, which are stored
// and loaded in one access of 16 bytes.
//
// Kernels splice this file in at #include "ll128.cu", behind signals.cu; strided_body.cu gives the reason.
//
// Packets are sent in tiles of TILE_BYTES, one tile per warp. A lane has four packets of a tile, 512 bytes apart, so
// that the lanes of a warp store 512 contiguous bytes at once. The lower 16 bits of the epoch are enough, since every
// second epoch overwrites the memory of the packets.

#define TILE_BYTES 2048  // of packets
#define WIDE_BYTES 56    // of data in a lane's four packets

// A lane's 56 bytes of a tile, as seven words of 8 bytes, and the four packets that carry them.
struct Wide {
    u64 word[7];

    __device__ __forceinline__ void set(u32 i, u64 value) { word[i] = value; }
    __device__ __forceinline__ void set(u32 i, u32 value) { word[i / 2] = i % 2 ? word[i / 2] | u64(value) << 32 : value; }
    __device__ __forceinline__ void get(u32 i, u64& value) const { value = word[i]; }
    __device__ __forceinline__ void get(u32 i, u32& value) const { value = u32(word[i / 2] >> (i % 2 ? 32 : 0)); }

    // Words 0 to 3 are the first halves of the packets. Words 4 to 6 are cut into four parts of 48 bits. Each second
    // half has one part in its upper bits, and the epoch in its lower 16 bits.
    __device__ __forceinline__ void send(u64 at, u32 epoch) const
    {
        const u64 mark = epoch & 0xffff;
        store_wide(at, word[0], word[4] << 16 | mark);
        store_wide(at + 512, word[1], word[5] << 32 | (word[4] >> 48) << 16 | mark);
        store_wide(at + 1024, word[2], word[6] << 48 | (word[5] >> 32) << 16 | mark);
        store_wide(at + 1536, word[3], (word[6] & ~u64(0xffff)) | mark);
    }

    __device__ __forceinline__ bool take(u64 at, u32 epoch)
    {
        Word16 packet[4];
#pragma unroll
        for (u32 k = 0; k < 4; ++k)
            packet[k] = load_wide(at + 512 * k);
        bool came = true;
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
            came &= ((packet[k].high ^ epoch) & 0xffff) == 0;
            word[k] = packet[k].low;
        }
        const u64 a = packet[0].high >> 16, b = packet[1].high >> 16, c = packet[2].high >> 16, d = packet[3].high >> 16;
        word[4] = a | b << 48;
        word[5] = b >> 16 | c << 32;
        word[6] = c >> 32 | d << 16;
        return came;
    }
};
