//! Any bytes are a safetensors file or a typed error; of a file, every tensor can be read.
#![no_main]

use lacuna_files::{Mapping, TensorError, safetensors};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let tensors = match safetensors::parse(&Mapping::from(bytes.to_vec())) {
        Ok(tensors) => tensors,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let mut end = None;
    for summary in tensors.iter() {
        match tensors.require(summary.name) {
            Ok(tensor) => {
                let elements: usize = tensor.shape().iter().product();
                assert_eq!(
                    elements * tensor.dtype().block_bytes(),
                    tensor.bytes().len()
                );
                assert!(end.is_none_or(|end| tensor.file_range().start == end));
                end = Some(tensor.file_range().end);
            }
            Err(error) => {
                assert!(matches!(error, TensorError::UnsupportedType { .. }));
                end = None;
            }
        }
    }
    assert!(tensors.total_bytes() <= bytes.len() as u64);
    tensors.by_type();
});
