//! GGUF reading and writing: round trips, every kind of damage, and split models.

use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::tensor;
use lacuna_kernels::DType;

/// A header with one entry of every kind and three tensors, and its bytes.
fn sample() -> Vec<u8> {
    let mut header = Writer::new();
    header
        .set("general.architecture", "qwen3")
        .set("qwen3.block_count", 28u32)
        .set("qwen3.rope.freq_base", 1e6f32)
        .set("tokenizer.ggml.add_bos_token", false)
        .set("tokenizer.ggml.tokens", ["a", "b", "ab"].as_slice())
        .set("tokenizer.ggml.scores", [0.5f32, -1.0, 2.0].as_slice())
        .set("tokenizer.ggml.token_type", [1i32, 1, 3].as_slice());
    header.tensor("weight", DType::F32, &[3, 2]).unwrap();
    header.tensor("quantized", DType::Q8_0, &[2, 64]).unwrap();
    header.tensor("norm", DType::F32, &[5]).unwrap();
    let mut body = header.begin(Vec::new()).unwrap();
    body.tensor("weight", &[1; 24]).unwrap();
    body.tensor("quantized", &[2; 136]).unwrap();
    body.tensor("norm", &[3; 20]).unwrap();
    body.finish().unwrap()
}

fn parse(bytes: impl Into<Vec<u8>>) -> Result<File, Error> {
    File::parse(Mapping::from(bytes.into()))
}

/// Reads everything a user of the file could read.
fn read_all(file: &File) -> usize {
    let mut bytes = 0;
    for (key, value) in file.metadata().iter() {
        bytes += key.len() + value.describe().len();
        if let Value::Array(array) = value {
            bytes += array
                .strings()
                .map_or(0, |strings| strings.map(<[u8]>::len).sum());
            bytes += array
                .scalars()
                .map_or(0, |scalars| scalars.map(|v| v.describe().len()).sum());
        }
    }
    for summary in file.tensors().iter() {
        if let Ok(Some(tensor)) = file.tensors().get(summary.name) {
            bytes += tensor
                .bytes()
                .iter()
                .map(|&byte| usize::from(byte))
                .sum::<usize>();
        }
    }
    bytes + file.tensors().by_type().len()
}

/// A header written by hand, for what the writer refuses to write.
struct Raw(Vec<u8>);

impl Raw {
    fn new(tensors: u64, entries: u64) -> Self {
        let raw = Self(MAGIC.to_vec()).u32(3);
        raw.u64(tensors).u64(entries)
    }

    fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn text(mut self, text: &str) -> Self {
        self = self.u64(text.len() as u64);
        self.0.extend(text.as_bytes());
        self
    }

    fn tensor(self, name: &str, dims: &[u64], element: u32, offset: u64) -> Self {
        let raw = self.text(name).u32(dims.len() as u32);
        dims.iter()
            .fold(raw, |raw, &dim| raw.u64(dim))
            .u32(element)
            .u64(offset)
    }

    fn data(mut self, bytes: usize) -> Self {
        let start = self.0.len().next_multiple_of(32);
        self.0.resize(start + bytes, 7);
        self
    }
}

#[test]
fn what_is_written_is_read_back() {
    let file = parse(sample()).unwrap();
    let metadata = file.metadata();
    assert_eq!(file.version(), 3);
    assert_eq!(
        metadata.require::<&str>("general.architecture").unwrap(),
        "qwen3"
    );
    assert_eq!(metadata.require::<u32>("qwen3.block_count").unwrap(), 28);
    assert_eq!(metadata.require::<usize>("qwen3.block_count").unwrap(), 28);
    assert_eq!(
        metadata.require::<f32>("qwen3.rope.freq_base").unwrap(),
        1e6
    );
    assert_eq!(
        metadata
            .get::<bool>("tokenizer.ggml.add_bos_token")
            .unwrap(),
        Some(false)
    );
    let tokens: Vec<&str> = metadata.require("tokenizer.ggml.tokens").unwrap();
    assert_eq!(tokens, ["a", "b", "ab"]);
    let strings: Strings<'_> = metadata.require("tokenizer.ggml.tokens").unwrap();
    assert_eq!(strings.len(), 3);
    let scores: Vec<f32> = metadata.require("tokenizer.ggml.scores").unwrap();
    assert_eq!(scores, [0.5, -1.0, 2.0]);
    let types: Vec<i32> = metadata.require("tokenizer.ggml.token_type").unwrap();
    assert_eq!(types, [1, 1, 3]);

    let weight = file.tensors().require_shape("weight", &[3, 2]).unwrap();
    assert_eq!(
        (weight.dtype(), weight.bytes()),
        (DType::F32, [1u8; 24].as_slice())
    );
    let quantized = file.tensors().require("quantized").unwrap();
    assert_eq!(
        (quantized.dtype(), quantized.bytes()),
        (DType::Q8_0, [2u8; 136].as_slice())
    );
    assert_eq!(quantized.file_range().start % 32, 0);
    assert_eq!(
        file.tensors().get("norm").unwrap().unwrap().bytes(),
        [3; 20]
    );
    assert!(file.tensors().get("other").unwrap().is_none());
}

#[test]
fn what_a_file_says_of_its_model_is_carried_over_as_it_is() {
    let mut header = Writer::new();
    header
        .set("general.architecture", "qwen3")
        .set("small", 7u8)
        .set("deep", [1i64, -2].as_slice())
        .set("split.count", 3u16)
        .align(64);
    let source = parse(header.to_bytes()).unwrap();
    let mut copy = Writer::new();
    copy.set("small", 8u8).set("own", true);
    copy.carry(source.metadata());
    let found = parse(copy.to_bytes()).unwrap();
    let kept: Vec<_> = found.metadata().iter().map(|(key, _)| key).collect();
    assert_eq!(kept, ["deep", "general.architecture", "own", "small"]);
    for key in ["deep", "general.architecture", "small"] {
        let value = |file: &File| format!("{:?}", file.metadata().require::<Value>(key).unwrap());
        assert_eq!(value(&found), value(&source), "{key}");
    }
    // In the order of the file, behind what is only in the copy.
    let order: Vec<_> = found.metadata().encoded().map(|(key, ..)| key).collect();
    assert_eq!(order, ["own", "general.architecture", "small", "deep"]);
}

#[test]
fn version_2_reads_as_version_3_does() {
    let mut bytes = sample();
    bytes[4] = 2;
    let file = parse(bytes).unwrap();
    assert_eq!((file.version(), file.tensors().len()), (2, 3));
}

#[test]
fn tensors_are_listed_in_file_order_and_totalled_by_type() {
    let file = parse(sample()).unwrap();
    let names: Vec<&str> = file.tensors().iter().map(|tensor| tensor.name).collect();
    assert_eq!(names, ["weight", "quantized", "norm"]);
    let totals = file.tensors().by_type();
    let line = |at: usize| {
        (
            totals[at].type_name.as_str(),
            totals[at].tensors,
            totals[at].elements,
        )
    };
    assert_eq!((line(0), line(1)), (("q8_0", 1, 128), ("f32", 2, 11)));
    assert_eq!(file.tensors().total_bytes(), 24 + 136 + 20);
}

#[test]
fn a_vocabulary_without_tensors_is_a_model_file_too() {
    let mut header = Writer::new();
    let tokens: Vec<String> = (0..150_000).map(|i| format!("token{i}")).collect();
    header.set("tokenizer.ggml.tokens", tokens.as_slice());
    let mut bytes = header.to_bytes();
    let padding = bytes.iter().rev().take_while(|&&byte| byte == 0).count();
    bytes.truncate(bytes.len() - padding);
    let file = parse(bytes).unwrap();
    assert!(file.tensors().is_empty());
    let strings: Strings<'_> = file.metadata().require("tokenizer.ggml.tokens").unwrap();
    assert!(strings.eq(tokens.iter().map(String::as_bytes)));
}

#[test]
fn a_wrong_value_names_the_key_and_says_what_is_there() {
    let file = parse(sample()).unwrap();
    let metadata = file.metadata();
    let message = |error: Error| error.to_string();
    assert_eq!(
        message(metadata.require::<u32>("general.architecture").unwrap_err()),
        "metadata key `general.architecture` should be a number of 32 bits, and is the text \"qwen3\""
    );
    assert!(
        message(
            metadata
                .require::<&str>("tokenizer.ggml.tokens")
                .unwrap_err()
        )
        .ends_with("an array of 3 x string")
    );
    assert!(matches!(
        metadata.require::<u32>("none"),
        Err(Error::MissingKey { .. })
    ));
    assert!(matches!(
        metadata.get::<bool>("qwen3.block_count"),
        Err(Error::WrongValue { .. })
    ));
    assert!(matches!(
        metadata.get::<Vec<u32>>("tokenizer.ggml.scores"),
        Err(Error::WrongValue { .. })
    ));
}

#[test]
fn integers_convert_between_widths_when_they_fit() {
    let mut header = Writer::new();
    header
        .set("small", 7u8)
        .set("negative", -1i32)
        .set("large", 1u64 << 40);
    let file = parse(header.to_bytes()).unwrap();
    assert_eq!(file.metadata().require::<u64>("small").unwrap(), 7);
    assert_eq!(file.metadata().require::<i32>("small").unwrap(), 7);
    assert_eq!(file.metadata().require::<i32>("negative").unwrap(), -1);
    assert!(file.metadata().require::<u32>("negative").is_err());
    assert!(file.metadata().require::<u32>("large").is_err());
    assert_eq!(file.metadata().require::<usize>("large").unwrap(), 1 << 40);
}

#[test]
fn every_truncation_is_a_typed_error() {
    let bytes = sample();
    for length in 0..bytes.len() {
        let result = parse(&bytes[..length]);
        // The last tensor may lack only its padding.
        let padding = bytes.len() - length;
        match result {
            Ok(file) => assert!(
                padding <= 12 && read_all(&file) > 0,
                "{length} bytes parsed"
            ),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
}

#[test]
fn every_flipped_bit_is_an_error_or_a_readable_file() {
    let bytes = sample();
    for position in 0..bytes.len() {
        for bit in 0..8 {
            let mut damaged = bytes.clone();
            damaged[position] ^= 1 << bit;
            if let Ok(file) = parse(damaged) {
                read_all(&file);
            }
        }
    }
}

#[test]
fn every_byte_of_the_header_set_to_an_extreme_is_no_panic() {
    let bytes = sample();
    for position in 0..bytes.len() {
        for value in [0x00, 0x7f, 0x80, 0xff] {
            let mut damaged = bytes.clone();
            damaged[position] = value;
            if let Ok(file) = parse(damaged) {
                read_all(&file);
            }
        }
    }
}

#[test]
fn foreign_files_are_told_apart() {
    assert!(matches!(
        parse(*b"\x80\x02}q\x00junkjunk"),
        Err(Error::NotGguf { .. })
    ));
    assert!(matches!(parse(*b"GG"), Err(Error::Truncated { .. })));
    let versioned = |version: u32| parse([MAGIC, version.to_le_bytes()].concat());
    assert!(matches!(
        versioned(1),
        Err(Error::UnsupportedVersion { version: 1 })
    ));
    assert!(matches!(
        versioned(4),
        Err(Error::UnsupportedVersion { version: 4 })
    ));
    assert!(matches!(
        versioned(3u32.swap_bytes()),
        Err(Error::BigEndian)
    ));
}

#[test]
fn more_tensors_than_any_model_has_are_refused() {
    let count = tensor::TENSOR_LIMIT + 1;
    let parsed = parse(Raw::new(count as u64, 0).data(count * 25).0);
    assert!(matches!(
        parsed,
        Err(Error::TooManyTensors { count, limit }) if count == limit + 1
    ));
}

#[test]
fn counts_in_the_billions_allocate_nothing() {
    let tensors = parse(Raw::new(4_000_000_000, 0).data(64).0);
    assert!(matches!(
        tensors,
        Err(Error::ImpossibleCount {
            what: "tensors",
            count: 4_000_000_000,
            ..
        })
    ));
    let entries = parse(Raw::new(0, u64::MAX).data(64).0);
    assert!(matches!(
        entries,
        Err(Error::ImpossibleCount {
            what: "metadata entries",
            ..
        })
    ));
    let length = parse(Raw::new(0, 1).u64(1 << 40).data(64).0);
    assert!(matches!(
        length,
        Err(Error::Truncated {
            what: "metadata key",
            ..
        })
    ));
    let value = parse(Raw::new(0, 1).text("key").u32(8).u64(u64::MAX).data(64).0);
    assert!(matches!(
        value,
        Err(Error::Truncated {
            what: "metadata text",
            ..
        })
    ));
    let array = parse(
        Raw::new(0, 1)
            .text("key")
            .u32(9)
            .u32(4)
            .u64(1 << 62)
            .data(64)
            .0,
    );
    assert!(matches!(
        array,
        Err(Error::ImpossibleCount {
            what: "array elements",
            ..
        })
    ));
    let strings = parse(
        Raw::new(0, 1)
            .text("key")
            .u32(9)
            .u32(8)
            .u64(3_000_000_000)
            .data(64)
            .0,
    );
    assert!(matches!(
        strings,
        Err(Error::ImpossibleCount {
            what: "array elements",
            ..
        })
    ));
}

#[test]
fn damaged_metadata_is_named() {
    let twice = parse(
        Raw::new(0, 2)
            .text("key")
            .u32(4)
            .u32(1)
            .text("key")
            .u32(4)
            .u32(2)
            .0,
    );
    assert!(matches!(twice, Err(Error::DuplicateKey { key }) if key == "key"));
    let unknown = parse(Raw::new(0, 1).text("key").u32(13).data(8).0);
    assert!(matches!(
        unknown,
        Err(Error::UnknownValueType { id: 13, .. })
    ));
    let nameless = parse(Raw::new(0, 1).text("").u32(4).u32(1).data(8).0);
    assert!(matches!(nameless, Err(Error::BadName { .. })));
    for alignment in [0, 3, 48, u32::MAX] {
        let unaligned = parse(
            Raw::new(0, 1)
                .text("general.alignment")
                .u32(4)
                .u32(alignment)
                .0,
        );
        assert!(
            matches!(unaligned, Err(Error::BadAlignment { .. })),
            "{alignment}"
        );
    }
}

#[test]
fn arrays_nest_a_little_and_no_more() {
    let nested = |levels: u32| {
        let raw = Raw::new(0, 1).text("key").u32(9);
        let raw = (1..levels).fold(raw, |raw, _| raw.u32(9).u64(1));
        parse(raw.u32(4).u64(1).u32(5).0)
    };
    assert!(read_all(&nested(2).unwrap()) > 0);
    assert!(read_all(&nested(4).unwrap()) > 0);
    assert!(matches!(nested(5), Err(Error::NestedTooDeep { .. })));
    assert!(matches!(nested(100_000), Err(Error::NestedTooDeep { .. })));
}

#[test]
fn damaged_tensor_tables_are_named() {
    let one = |dims: &[u64], element, offset| {
        parse(Raw::new(1, 0).tensor("t", dims, element, offset).data(64).0)
    };
    assert!(one(&[16], 0, 0).is_ok());
    assert!(matches!(one(&[17], 0, 0), Err(Error::TensorPastEnd { .. })));
    assert!(matches!(
        one(&[16], 0, 32),
        Err(Error::TensorPastEnd { .. })
    ));
    assert!(matches!(
        one(&[16], 0, u64::MAX - 31),
        Err(Error::TensorPastEnd { .. })
    ));
    assert!(matches!(
        one(&[1], 0, 4),
        Err(Error::MisalignedTensor { offset: 4, .. })
    ));
    assert!(matches!(
        one(&[1 << 32, 1 << 32], 0, 0),
        Err(Error::TensorTooLarge { .. })
    ));
    assert!(matches!(
        one(&[0, 1 << 63, 1 << 63], 0, 0),
        Err(Error::TensorTooLarge { .. })
    ));
    assert!(matches!(
        one(&[1 << 62], 0, 0),
        Err(Error::TensorTooLarge { .. })
    ));
    assert!(matches!(
        one(&[33], 8, 0),
        Err(Error::PartialBlock {
            columns: 33,
            block_len: 32,
            ..
        })
    ));
    assert!(matches!(
        one(&[1; 5], 0, 0),
        Err(Error::TooManyDimensions { dimensions: 5, .. })
    ));
    let twice = Raw::new(2, 0)
        .tensor("t", &[8], 0, 0)
        .tensor("t", &[8], 0, 32)
        .data(64);
    assert!(matches!(parse(twice.0), Err(Error::DuplicateTensor { .. })));
    let overlapping = Raw::new(2, 0)
        .tensor("a", &[16], 0, 0)
        .tensor("b", &[8], 0, 32)
        .data(64);
    assert!(matches!(
        parse(overlapping.0),
        Err(Error::OverlappingTensors { .. })
    ));
}

/// Found by fuzzing: no elements because one dimension is 0, so no bytes are needed, but the length
/// of a row overflowed in whoever computed it.
#[test]
fn an_empty_tensor_with_endless_rows_is_too_large() {
    let file = Raw::new(1, 0).tensor("t", &[1 << 62, 0], 0, 0).data(32);
    assert!(matches!(parse(file.0), Err(Error::TensorTooLarge { .. })));
}

#[test]
fn a_tensor_without_elements_has_no_bytes() {
    let file = parse(Raw::new(1, 0).tensor("t", &[0], 0, 0).0).unwrap();
    assert!(file.tensors().require("t").unwrap().bytes().is_empty());
}

#[test]
fn an_unsupported_type_matters_only_when_asked_for() {
    let raw = Raw::new(3, 0)
        .tensor("iq", &[256], 19, 0)
        .tensor("new", &[8], 999, 96);
    let file = parse(raw.tensor("fine", &[4], 0, 128).data(160).0).unwrap();
    assert!(file.tensors().require("fine").is_ok());
    assert!(file.tensors().contains("iq"));
    let found = |name| match file.tensors().get(name) {
        Err(tensor::Error::UnsupportedType { found, .. }) => found,
        other => panic!("{other:?}"),
    };
    assert_eq!(
        (found("iq"), found("new")),
        ("iq1_s".to_owned(), "number 999".to_owned())
    );
    assert_eq!(file.tensors().iter().next().unwrap().bytes, 50);
}

#[test]
fn missing_and_misshapen_tensors_are_named() {
    let file = parse(sample()).unwrap();
    let missing = file.tensors().require("absent").unwrap_err();
    assert!(missing.to_string().contains("`absent` is missing"));
    let misshapen = file.tensors().require_shape("weight", &[2, 3]).unwrap_err();
    assert!(misshapen.to_string().contains("shape [3, 2] where [2, 3]"));
}

#[test]
fn the_writer_refuses_what_does_not_add_up() {
    let mut header = Writer::new();
    assert!(matches!(
        header.tensor("t", DType::Q4K, &[2, 128]),
        Err(WriteError::Shape { .. })
    ));
    header
        .tensor("a", DType::F32, &[2])
        .unwrap()
        .tensor("b", DType::F32, &[2])
        .unwrap();
    let mut body = header.clone().begin(Vec::new()).unwrap();
    assert!(matches!(
        body.tensor("b", &[0; 8]),
        Err(WriteError::Order { .. })
    ));
    let mut body = header.clone().begin(Vec::new()).unwrap();
    assert!(matches!(
        body.tensor("a", &[0; 7]),
        Err(WriteError::Length {
            expected: 8,
            found: 7,
            ..
        })
    ));
    let mut body = header.begin(Vec::new()).unwrap();
    body.tensor("a", &[0; 8]).unwrap();
    assert!(matches!(body.finish(), Err(WriteError::Unwritten { name }) if name == "b"));
}

#[test]
fn the_writer_knows_the_length_of_the_file() {
    let mut header = Writer::new();
    header.align(64).set("key", "value");
    header.tensor("a", DType::Bf16, &[3, 5]).unwrap();
    let expected = header.file_len();
    let mut body = header.begin(Vec::new()).unwrap();
    body.tensor("a", &[9; 30]).unwrap();
    let bytes = body.finish().unwrap();
    assert_eq!(bytes.len() as u64, expected);
    assert_eq!(
        parse(bytes)
            .unwrap()
            .tensors()
            .require("a")
            .unwrap()
            .file_range()
            .start
            % 64,
        0
    );
}

/// Writes a three-part model into `folder`, changed by `edit`.
fn write_parts(folder: &Path, edit: impl Fn(u16, &mut Writer)) {
    for number in 0..3u16 {
        let mut header = Writer::new();
        header
            .set("split.no", number)
            .set("split.count", 3u16)
            .set("split.tensors.count", 3i32);
        header
            .tensor(&format!("part{number}"), DType::F32, &[1])
            .unwrap();
        edit(number, &mut header);
        let mut body = header.begin(Vec::new()).unwrap();
        body.tensor(&format!("part{number}"), &[number as u8; 4])
            .unwrap();
        let name = format!("model-{:05}-of-00003.gguf", number + 1);
        std::fs::write(folder.join(name), body.finish().unwrap()).unwrap();
    }
}

fn open(path: &Path) -> Result<File, Error> {
    File::open(Mapping::open(path).unwrap())
}

#[test]
fn a_split_model_is_opened_by_its_first_file() {
    let folder = tempfile::tempdir().unwrap();
    write_parts(folder.path(), |_, _| {});
    let file = open(&folder.path().join("model-00001-of-00003.gguf")).unwrap();
    assert_eq!(file.tensors().len(), 3);
    assert_eq!(file.tensors().require("part2").unwrap().bytes(), [2; 4]);
    let later = open(&folder.path().join("model-00002-of-00003.gguf"));
    assert!(matches!(
        later,
        Err(Error::NotFirstShard {
            number: 2,
            count: 3
        })
    ));
}

#[test]
fn a_split_model_with_a_file_missing_or_wrong_says_which() {
    let folder = tempfile::tempdir().unwrap();
    let first = folder.path().join("model-00001-of-00003.gguf");
    write_parts(folder.path(), |_, _| {});
    std::fs::rename(&first, folder.path().join("renamed.gguf")).unwrap();
    assert!(matches!(
        open(&folder.path().join("renamed.gguf")),
        Err(Error::ShardName { count: 3 })
    ));

    write_parts(folder.path(), |_, _| {});
    std::fs::remove_file(folder.path().join("model-00003-of-00003.gguf")).unwrap();
    assert!(matches!(
        open(&first),
        Err(Error::MissingShard {
            number: 3,
            count: 3,
            ..
        })
    ));

    std::fs::write(folder.path().join("model-00003-of-00003.gguf"), b"GGUFjunk").unwrap();
    let error = open(&first).unwrap_err();
    assert!(
        error.to_string().contains("model-00003-of-00003.gguf"),
        "{error}"
    );

    write_parts(folder.path(), |number, header| {
        header.set("split.no", number.min(1));
    });
    assert!(matches!(open(&first), Err(Error::Shard { .. })));

    write_parts(folder.path(), |_, header| {
        header.set("split.tensors.count", 7i32);
    });
    assert!(matches!(
        open(&first),
        Err(Error::ShardMismatch {
            expected: 7,
            found: 3,
            ..
        })
    ));

    write_parts(folder.path(), |_, header| {
        header.set("split.count", u64::MAX);
    });
    assert!(open(&first).is_err());
}

/// What the model of the property test holds for one tensor.
type Plan = (DType, Vec<usize>, u8);

fn plan() -> impl Strategy<Value = Vec<Plan>> {
    let dtype = proptest::sample::select(DType::ALL.as_slice());
    let tensor = (dtype, 1..3usize, 0..4usize, 1..4usize, any::<u8>()).prop_map(
        |(dtype, blocks, rows, outer, fill)| {
            (dtype, vec![outer, rows, blocks * dtype.block_len()], fill)
        },
    );
    proptest::collection::vec(tensor, 0..8)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_file_written_reads_back_the_same(
        plan in plan(),
        texts in proptest::collection::vec(".{0,12}", 0..20),
        numbers in proptest::collection::vec(any::<i32>(), 0..20),
        pairs in proptest::collection::btree_map("[a-z.]{1,12}", any::<u64>(), 0..12),
        alignment in 0..8u32,
    ) {
        let mut header = Writer::new();
        header.align(1 << alignment).set("A.texts", texts.as_slice()).set("A.numbers", numbers.as_slice());
        for (key, value) in &pairs {
            header.set(key, *value);
        }
        for (index, (dtype, shape, _)) in plan.iter().enumerate() {
            header.tensor(&format!("t{index}"), *dtype, shape).unwrap();
        }
        let expected_len = header.file_len();
        let contents: Vec<Vec<u8>> = plan.iter().map(|(dtype, shape, fill)| {
            vec![*fill; shape[0] * shape[1] * dtype.row_bytes(shape[2]).unwrap()]
        }).collect();
        let mut body = header.begin(Vec::new()).unwrap();
        for (index, content) in contents.iter().enumerate() {
            body.tensor(&format!("t{index}"), content).unwrap();
        }
        let bytes = body.finish().unwrap();
        prop_assert_eq!(bytes.len() as u64, expected_len);

        let file = parse(bytes).unwrap();
        prop_assert_eq!(file.metadata().len(), pairs.len() + 3);
        prop_assert_eq!(file.metadata().require::<Vec<&str>>("A.texts").unwrap(), texts);
        prop_assert_eq!(file.metadata().require::<Vec<i32>>("A.numbers").unwrap(), numbers);
        for (key, value) in &pairs {
            prop_assert_eq!(file.metadata().require::<u64>(key).unwrap(), *value);
        }
        prop_assert_eq!(file.tensors().len(), plan.len());
        for (index, (dtype, shape, _)) in plan.iter().enumerate() {
            let tensor = file.tensors().require_shape(&format!("t{index}"), shape).unwrap();
            prop_assert_eq!(tensor.dtype(), *dtype);
            prop_assert_eq!(tensor.bytes(), contents[index].as_slice());
        }
    }

    #[test]
    fn random_damage_never_panics(
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = sample();
        for (position, value) in edits {
            let at = position.index(bytes.len());
            bytes[at] = value;
        }
        bytes.truncate(cut.index(bytes.len()) + 1);
        if let Ok(file) = parse(bytes) {
            read_all(&file);
        }
    }
}

#[test]
fn lists_of_whole_numbers_are_read_as_they_were_written() {
    let numbers = [0, -7, 31_999, i64::from(i32::MAX), i64::from(i32::MIN)];
    let mut header = Writer::new();
    header.set("general.architecture", "none");
    for (name, kind) in [("narrow", Integers::I32), ("wide", Integers::I64)] {
        header.integers(name, kind, numbers.len());
    }
    header.tensor("float", DType::F32, &[1]).unwrap();
    let mut body = header.begin(Vec::new()).unwrap();
    body.tensor("narrow", &Integers::I32.encode(&numbers))
        .unwrap();
    body.tensor("wide", &Integers::I64.encode(&numbers))
        .unwrap();
    body.tensor("float", &[0; 4]).unwrap();
    let file = File::parse(Mapping::from(body.finish().unwrap())).unwrap();
    let tensors = file.tensors();
    for (name, kind) in [("narrow", "i32"), ("wide", "i64")] {
        assert_eq!(
            tensors.integers(name).unwrap().as_deref(),
            Some(&numbers[..])
        );
        let found = tensors.iter().find(|tensor| tensor.name == name).unwrap();
        assert_eq!((found.type_name, found.shape), (kind, &[numbers.len()][..]));
        assert!(Integers::of_name(found.type_name).is_some());
    }
    assert_eq!(tensors.integers("none").unwrap(), None);
    assert!(tensors.integers("float").is_err());
}
