//! lacuna-kernels
