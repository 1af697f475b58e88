-- By which code a run went on, from which checkpoint on. The index holds only changes of it: a run that nobody changed writes nothing here.

CREATE INDEX entry_versions ON outlast.entry (run_no, seq, entry_no) WHERE kind = 'VersionChanged';

-- One row a stretch of checkpoints: those after `after_seq` were made by this code, until the next row of the run.
CREATE VIEW outlast.versions AS
SELECT r.run_id, e.seq AS after_seq, coalesce(e.body ->> 'agent_version', '') AS agent_version, coalesce(e.body ->> 'code', '') AS code,
       coalesce(e.body ->> 'library', '') AS library, (e.body ->> 'format')::integer AS format, outlast.iso(e.at) AS at
  FROM outlast.entry e JOIN outlast.run r ON r.run_no = e.run_no
 WHERE (e.kind = 'RunStarted' AND e.seq = 0) OR e.kind = 'VersionChanged';
