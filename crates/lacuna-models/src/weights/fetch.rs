//! How the bytes of tensors are had while a model is loaded: where the file is mapped, or read into memory.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use lacuna_files::reader::{Buffer, Caching, Extent, FileReader, Method, ReadDevice, ReadFile};
use lacuna_files::{Mapping, Progress, Tensor, Tensors};

use crate::error::{LoadError, UnreadableWeights};
use crate::plan::{WeightPlan, WeightSource};

/// What makes a device that reads, in place of the best there is.
pub type MakeDevice<'a> = &'a dyn Fn() -> Box<dyn ReadDevice>;

/// The files of a model, opened to be read.
#[derive(Debug, Default, Clone)]
pub(crate) struct Files(HashMap<PathBuf, ReadFile>);

impl Files {
    pub(super) fn open<'a>(
        tensors: impl Iterator<Item = &'a Tensors>,
        caching: Caching,
    ) -> Result<Self, LoadError> {
        let mut files = HashMap::new();
        for mapping in tensors.flat_map(Tensors::mappings) {
            let opened = ReadFile::open(mapping, caching).map_err(LoadError::Reading)?;
            if let Some(file) = opened {
                files.insert(file.path().to_owned(), file);
            }
        }
        Ok(Self(files))
    }

    /// A reader of them.
    pub(crate) fn reader(&self, device: Option<MakeDevice<'_>>) -> Result<FileReader, LoadError> {
        match device {
            Some(make) => Ok(FileReader::with(make())),
            None => FileReader::new(self.0.values()).map_err(LoadError::Reading),
        }
    }

    /// Of several files, how the one is read that takes the most of the page cache.
    pub(super) fn method(&self) -> Option<Method> {
        let methods = self.0.values().map(ReadFile::method);
        methods.max_by_key(|method| *method as u8)
    }

    /// Where bytes of a tensor are to be read; `None` for one that is in memory.
    pub(crate) fn extent(&self, tensor: &Tensor, bytes: Range<usize>) -> Option<Extent> {
        let file = self.0.get::<Path>(tensor.mapping().path()?)?;
        let first = tensor.file_range().start;
        Some(Extent {
            file: file.clone(),
            range: (first + bytes.start) as u64..(first + bytes.end) as u64,
        })
    }
}

/// Where bytes come from while a model is loaded.
pub(super) enum Fetch<'a> {
    /// They stay where the file is mapped.
    Mapped,
    /// They are read.
    Read(Box<Reading<'a>>),
}

/// Reading the weights that are to be in memory, but for those that a [`Stream`](super::Stream) has.
pub(super) struct Reading<'a> {
    plan: &'a WeightPlan,
    files: Files,
    reader: FileReader,
    progress: &'a mut dyn Progress,
    /// Tensors that several matrices are parts of, by where they are.
    shared: HashMap<(PathBuf, usize), Tensor>,
}

impl<'a> Fetch<'a> {
    /// From `source`; matrices that `plan` has uses of are left where they are.
    pub(super) fn new(
        tensors: [Option<&Tensors>; 3],
        source: WeightSource,
        plan: &'a WeightPlan,
        device: Option<MakeDevice<'_>>,
        progress: &'a mut dyn Progress,
    ) -> Result<Self, LoadError> {
        let caching = match source {
            WeightSource::Mmap => return Ok(Self::Mapped),
            WeightSource::Pread => Caching::Allowed,
            WeightSource::Direct => Caching::Avoided,
        };
        let files = Files::open(tensors.into_iter().flatten(), caching)?;
        Ok(Self::Read(Box::new(Reading {
            plan,
            reader: files.reader(device)?,
            files,
            progress,
            shared: HashMap::new(),
        })))
    }

    /// The same tensor, with its bytes in memory if it was mapped and weights are read.
    pub(super) fn whole(&mut self, tensor: Tensor) -> Result<Tensor, LoadError> {
        let Self::Read(reading) = self else {
            return Ok(tensor);
        };
        let bytes = tensor.file_range().len();
        let read = reading.read(&tensor, 0..bytes)?;
        Ok(read.map_or_else(
            || tensor.clone(),
            |read| tensor.read_as(tensor.shape(), read),
        ))
    }

    /// The same of a tensor that is asked for more than once: it is read once.
    pub(super) fn shared(&mut self, tensor: Tensor) -> Result<Tensor, LoadError> {
        let key = match (&*self, tensor.mapping().path()) {
            (Self::Read(_), Some(path)) => (path.to_owned(), tensor.file_range().start),
            _ => return Ok(tensor),
        };
        if let Self::Read(reading) = self
            && let Some(known) = reading.shared.get(&key)
        {
            return Ok(known.clone());
        }
        let read = self.whole(tensor)?;
        if let Self::Read(reading) = self {
            reading.shared.insert(key, read.clone());
        }
        Ok(read)
    }

    /// Rows of a tensor, which are the program's matrix `number`, read into memory. `None` where they are used in
    /// place, mapped or in memory already, and for what a [`Stream`](super::Stream) has.
    pub(super) fn rows(
        &mut self,
        number: usize,
        tensor: &Tensor,
        rows: Range<usize>,
        columns: usize,
    ) -> Result<Option<Tensor>, LoadError> {
        let Self::Read(reading) = self else {
            return Ok(None);
        };
        if reading.is_elsewhere(number) {
            return Ok(None);
        }
        let row_bytes = tensor.dtype().row_bytes(columns).unwrap_or(0);
        let bytes = rows.start * row_bytes..rows.end * row_bytes;
        if bytes.end > tensor.file_range().len() {
            // What is wrong with its shape is found where it would be used.
            return Ok(None);
        }
        let read = reading.read(tensor, bytes)?;
        Ok(read.map(|read| tensor.read_as(&[rows.len(), columns], read)))
    }

    /// Whether the program's tensor of this number is what a [`Stream`](super::Stream) has.
    pub(super) fn is_elsewhere(&self, number: usize) -> bool {
        match self {
            Self::Mapped => false,
            Self::Read(reading) => reading.is_elsewhere(number),
        }
    }

    /// The files, when all is loaded; `None` where they are mapped.
    pub(super) fn finish(self) -> Option<Files> {
        match self {
            Self::Mapped => None,
            Self::Read(reading) => Some(reading.files),
        }
    }
}

impl Reading<'_> {
    fn is_elsewhere(&self, number: usize) -> bool {
        let experts = &self.plan.experts;
        let is_matrix = self.plan.uses.iter().any(|it| it.matrix == number);
        let has_columns = self.plan.neurons.iter().any(|it| it.has(number));
        is_matrix || has_columns || experts.iter().any(|it| it.tensors.contains(&number))
    }

    fn read(&mut self, tensor: &Tensor, bytes: Range<usize>) -> Result<Option<Mapping>, LoadError> {
        let Some(extent) = self.files.extent(tensor, bytes.clone()) else {
            return Ok(None);
        };
        let buffer = Buffer::new(extent.buffer_bytes()).map_err(|error| extent.refused(&error));
        let read = buffer.and_then(|buffer| {
            self.reader.begin(0, extent, buffer);
            let done = self.reader.wait();
            done.expect("an extent that was begun is finished").result
        });
        let read = read.map_err(|source| UnreadableWeights {
            name: tensor.name().to_owned(),
            source,
        })?;
        self.progress.advance(bytes.len() as u64);
        Ok(Some(Mapping::from(read)))
    }
}
