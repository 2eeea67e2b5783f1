// Shared text of the kernels that reduce: complex elements, and the operations.
//
// Kernels splice this file in at #include "operations.cu", behind run_body.cu, whose types it needs; strided_body.cu
// gives the reason. In an operation, `of(a, b)` combines two values, of which a is first in the order of the ranks, and
// `from(a)` converts the first value of a total. Integers wrap around, as in NumPy. Min and Max of a number and a NaN
// are NaN. On a GPU the compiler uses fused multiply-adds in complex products, which affects their rounding.

template <class T>
struct Complex {
    T real, imag;
};

template <class T>
constexpr bool is_whole = T(1) / T(2) == T(0);

struct Same {
    template <class T>
    static __device__ __forceinline__ T from(T a) { return a; }
};

struct Truth {
    template <class T>
    static __device__ __forceinline__ T from(T a) { return T(a != T(0)); }
};

struct Sum : Same {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b)
    {
        if constexpr (is_whole<T>)
            return T(u64(a) + u64(b));
        else
            return a + b;
    }
    template <class T>
    static __device__ __forceinline__ Complex<T> of(Complex<T> a, Complex<T> b)
    {
        return {a.real + b.real, a.imag + b.imag};
    }
};

struct Prod : Same {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b)
    {
        if constexpr (is_whole<T>)
            return T(u64(a) * u64(b));
        else
            return a * b;
    }
    template <class T>
    static __device__ __forceinline__ Complex<T> of(Complex<T> a, Complex<T> b)
    {
        return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
    }
};

template <class T>
__device__ __forceinline__ bool is_nan(T a)
{
    if constexpr (is_whole<T>)
        return false;
    else
        return a != a;
}

struct Min : Same {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return a < b || is_nan(a) ? a : b; }
};

struct Max : Same {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return a > b || is_nan(a) ? a : b; }
};

struct LogicalAnd : Truth {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return T(a != T(0) && b != T(0)); }
};

struct LogicalOr : Truth {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return T(a != T(0) || b != T(0)); }
};

struct LogicalXor : Truth {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return T((a != T(0)) != (b != T(0))); }
};

struct BitwiseAnd : Same {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return T(a & b); }
};

struct BitwiseOr : Same {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return T(a | b); }
};

struct BitwiseXor : Same {
    template <class T>
    static __device__ __forceinline__ T of(T a, T b) { return T(a ^ b); }
};
