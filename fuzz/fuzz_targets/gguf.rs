//! Any bytes are a GGUF file or a typed error; of a file, everything can be read.
#![no_main]

use lacuna_files::gguf::{File, Value};
use lacuna_files::{Mapping, TensorError};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match File::parse(Mapping::from(bytes.to_vec())) {
        Ok(file) => read(&file, bytes.len()),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});

fn read(file: &File, file_len: usize) {
    for (key, value) in file.metadata().iter() {
        assert!(
            file.metadata()
                .get::<Value<'_>>(key)
                .is_ok_and(|value| value.is_some())
        );
        assert!(!value.describe().is_empty());
        if let Value::Array(array) = value {
            // Every element was counted when the file was opened, and is there.
            assert!(array.len() <= file_len);
            if let Some(strings) = array.strings() {
                assert_eq!(strings.count(), array.len());
            }
            if let Some(scalars) = array.scalars() {
                assert_eq!(scalars.count(), array.len());
            }
        }
    }
    let mut total = 0;
    for summary in file.tensors().iter() {
        match file.tensors().require(summary.name) {
            Ok(tensor) => {
                let rows: usize = tensor
                    .shape()
                    .split_last()
                    .map_or(1, |(_, rows)| rows.iter().product());
                let row = tensor
                    .dtype()
                    .row_bytes(tensor.shape().last().copied().unwrap_or(1));
                assert_eq!(row.map(|row| row * rows), Some(tensor.bytes().len()));
                total += tensor.bytes().len();
            }
            Err(error) => assert!(matches!(error, TensorError::UnsupportedType { .. })),
        }
    }
    assert!(total <= file_len, "tensors do not overlap");
    file.tensors().by_type();
}
