//! Writes small valid files into `corpus/`, for the fuzzer to start from:
//! `cargo run --manifest-path fuzz/Cargo.toml --example seeds`.

use std::error::Error;
use std::fs;
use std::path::Path;

use lacuna_files::{DType, gguf};

fn main() -> Result<(), Box<dyn Error>> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    fs::create_dir_all(corpus.join("gguf"))?;
    fs::create_dir_all(corpus.join("safetensors"))?;
    families(&corpus.join("families"))?;
    images(&corpus.join("images"))?;
    for dtype in DType::ALL {
        fs::write(corpus.join("gguf").join(dtype.name()), gguf_file(dtype)?)?;
    }
    let header = br#"{"__metadata__":{"format":"pt"},
        "a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},
        "b":{"dtype":"BF16","shape":[3],"data_offsets":[16,22]},
        "c":{"dtype":"I64","shape":[1],"data_offsets":[22,30]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.resize(bytes.len() + 30, 1);
    fs::write(corpus.join("safetensors/three"), bytes)?;
    Ok(())
}

/// The descriptions of the reference fixtures: each family's, in both kinds of files.
fn families(corpus: &Path) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(corpus)?;
    let fixtures = "../reference/families";
    for fixture in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(fixtures))? {
        let fixture = fixture?;
        for file in ["model.gguf", "hf/config.json"] {
            let path = fixture.path().join(file);
            if path.exists() {
                let name = fixture.file_name().to_string_lossy().into_owned();
                let ending = file.rsplit('.').next().unwrap_or_default();
                fs::copy(path, corpus.join(format!("{name}.{ending}")))?;
            }
        }
    }
    Ok(())
}

/// The reference's images, and the description of an encoder of them.
fn images(corpus: &Path) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(corpus)?;
    let reference = Path::new(env!("CARGO_MANIFEST_DIR")).join("../reference");
    for image in fs::read_dir(reference.join("images"))? {
        let image = image?;
        if !image.file_name().to_string_lossy().starts_with("expected") {
            fs::copy(image.path(), corpus.join(image.file_name()))?;
        }
    }
    requests(&corpus.with_file_name("image_requests"), &reference)?;
    fs::copy(
        reference.join("vision/gemma3/mmproj.gguf"),
        corpus.join("mmproj.gguf"),
    )?;
    Ok(())
}

/// An image as a file, and an address in its place, in requests of each of five interfaces.
fn requests(corpus: &Path, reference: &Path) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(corpus)?;
    for interface in 0..5u8 {
        for name in ["small.png", "gray.jpg", "two.gif", "lossy.webp"] {
            let file = fs::read(reference.join("images").join(name))?;
            let seed = [&[interface], &file[..]].concat();
            fs::write(corpus.join(format!("{interface}-{name}")), seed)?;
        }
        let text = [&[interface + 5], &b"https://example.com/a.png"[..]].concat();
        fs::write(corpus.join(format!("{interface}-address")), text)?;
        let json = [&[interface + 10], &br#"{"url":["a"],"b":null}"#[..]].concat();
        fs::write(corpus.join(format!("{interface}-json")), json)?;
    }
    Ok(())
}

/// A file with a value of every kind and two tensors.
fn gguf_file(dtype: DType) -> Result<Vec<u8>, gguf::WriteError> {
    let mut header = gguf::Writer::new();
    header
        .align(32)
        .set("general.architecture", "qwen3")
        .set("u8", 1u8)
        .set("i16", -2i16)
        .set("u64", 3u64)
        .set("f32", 0.5f32)
        .set("f64", 0.25f64)
        .set("bool", true)
        .set("texts", ["a", "bc", ""].as_slice())
        .set("numbers", [1i32, -1].as_slice());
    let (columns, bytes) = (dtype.block_len(), dtype.block_bytes());
    header
        .tensor("weight", dtype, &[2, columns])?
        .tensor("norm", DType::F32, &[3])?;
    let mut body = header.begin(Vec::new())?;
    body.tensor("weight", &vec![1; 2 * bytes])?;
    body.tensor("norm", &[0; 12])?;
    body.finish()
}
