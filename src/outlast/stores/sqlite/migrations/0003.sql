-- By which code a run went on, from which checkpoint on. The index holds only changes of it: a run that nobody changed writes nothing here.

CREATE INDEX entry_versions ON entry (run_no, seq, entry_no) WHERE kind = 'VersionChanged';

-- One row a stretch of checkpoints: those after `after_seq` were made by this code, until the next row of the run.
CREATE VIEW versions AS
SELECT r.run_id, e.seq AS after_seq, coalesce(e.body ->> '$.agent_version', '') AS agent_version, coalesce(e.body ->> '$.code', '') AS code,
       coalesce(e.body ->> '$.library', '') AS library, e.body ->> '$.format' AS format,
       strftime('%Y-%m-%dT%H:%M:%fZ', e.at / 1000.0, 'unixepoch') AS at
  FROM entry e JOIN run r ON r.run_no = e.run_no
 WHERE (e.kind = 'RunStarted' AND e.seq = 0) OR e.kind = 'VersionChanged';
